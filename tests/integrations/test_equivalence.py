"""The loop's own functions beside TRL's trainer: same checkpoint, prompts and responses, same updates.

Both in float32, on other code paths: TRL's fused head beside logits, padded batches beside shared prompts,
accumulated micro-batches beside whole mini-batches. Tolerances: losses 1e-5, gradients 1e-4 of their norm,
clip fractions and drift exactly, over updates 1 and 2 of a rollout (the second is off-policy).
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt -e '.[trl]'")
from test_sampled import routed_rollout
from test_trainer import Watched, trained
from trainers import GROUP, fixed_rollout

from moe_rl.integrations.carried import FORCED, counted_tokens, sequences, take_trace
from moe_rl.objectives import get_objective
from moe_rl.routing import expert_change
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import OptimConfig, ReplayConfig, RolloutConfig, TrainConfig
from moe_rl.training.groups import Groups
from moe_rl.training.learner import make_learner
from moe_rl.training.passes import native_routing, old_policy_pass, split
from moe_rl.training.signal import Signal
from moe_rl.training.update import gradient_update

UPDATES, NO_CLIPPING_OF_NORMS = 2, 1e9


class Gradients(Watched):
    """Keeps the gradient of every update."""

    def _clip_grad_norm(self, model):
        self.gradients = [*getattr(self, "gradients", []), gradient(model)]
        return super()._clip_grad_norm(model)


def gradient(model):
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def as_rollout_batch(parts):
    """TRL's shuffled micro-batches as the batch of the loop, rows in the order they are trained on."""
    ids, mask = (torch.cat(tensors) for tensors in zip(*map(sequences, parts), strict=True))
    counted = torch.cat([counted_tokens(part) for part in parts])
    response = torch.nn.functional.pad(counted, (ids.shape[1] - counted.shape[1], 0)).float()
    nothing = torch.zeros_like(response)
    prompt_length = ids.shape[1] - counted.shape[1]
    return RolloutBatch(ids, mask, response, nothing, torch.ones(len(ids)).bool(), prompt_length)


@pytest.mark.parametrize(
    ("name", "replay", "accumulated"),
    [
        ("grpo", None, 1),
        ("grpo", "old_policy", 1),
        ("gspo", None, 2),
        ("gspo", "old_policy", 1),
        ("dapo", "old_policy", 2),
        ("cispo", "rollout", 1),
        ("gmpo", "old_policy", 1),  # TRL lacks it
    ],
)
def test_the_first_updates_are_those_of_the_loop(trainer, scene, name, replay, accumulated):
    objective = get_objective(name)
    rows, options = 4 // accumulated, {"gradient_accumulation_steps": accumulated}
    built = trainer(
        cls=Gradients, replay=replay, objective=objective, advantages="paper", rows=rows,
        rollout_func=routed_rollout if replay == "rollout" else fixed_rollout, max_steps=UPDATES,
        steps_per_generation=UPDATES * accumulated, max_grad_norm=NO_CLIPPING_OF_NORMS, **options,
    )  # fmt: skip
    entries = trained(built)

    parts = built.rollouts[0]
    batch = as_rollout_batch(parts)
    config = TrainConfig(
        rollout=RolloutConfig(prompts=2, responses=GROUP),
        optim=OptimConfig(lr=3e-3, minibatches=UPDATES, warmup_updates=0, max_grad_norm=NO_CLIPPING_OF_NORMS),
        replay=ReplayConfig(source=replay),
    )
    learner = make_learner(scene.fresh(), objective, config)
    trace = None
    if replay == "rollout":
        traces = [take_trace(part, FORCED, built._layout) for part in parts]
        trace = replace(traces[0], experts=torch.cat([t.experts for t in traces]),
                        valid=torch.cat([t.valid for t in traces]), token_hash=None)  # fmt: skip
    zeros = torch.zeros(2, GROUP)
    groups = Groups(batch, zeros, 0.0, zeros[..., None], trace=trace)
    plan = split(len(batch), UPDATES, None)
    old = old_policy_pass(learner, groups, plan)
    first = batch.prompt_length
    old_logp = torch.cat([part["old_per_token_logps"] for part in parts])
    counted = batch.response_mask_BT[:, first:].bool()
    assert torch.allclose(old.logp_BT[:, first:][counted], old_logp[counted], atol=1e-5)

    signal = Signal(torch.cat([part["advantages"] for part in parts]), batch.response_mask_BT, {})
    for number, (minibatch, entry) in enumerate(zip(plan, entries, strict=True)):
        rows = slice(minibatch[0].start, minibatch[-1].stop)
        on = batch[rows].routing_rows_BT
        native = native_routing(learner.policy, batch, plan)[rows].where(on)
        update = gradient_update(learner, batch, old, signal, minibatch, number)
        assert entry["loss"] == pytest.approx(update.loss, abs=1e-5)
        ours = gradient(learner.policy)
        assert float((built.gradients[number] - ours).norm() / ours.norm()) < 1e-4
        assert entry["clip_frac/token"] == update.objective_metrics["clip_frac/token"]
        assert entry["clip_frac/sequence"] == update.objective_metrics["clip_frac/sequence"]
        if replay is None:
            change = expert_change(old.trace[rows].where(on), native)
        else:
            change = update.overridden
            assert entry["replay/overridden"] == change.experts
        assert entry["drift/old"] == change.experts
    assert entries[1]["drift/old"] > 0  # the second update was not trivial
