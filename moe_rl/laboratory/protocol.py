"""The measurement of GSPO §5.3: sample, record π_old's routing, update, record π_θ's on the same tokens.

Drift is measured by one forward before and after every update (`observe` on the slices that the updates use),
of native routing, so that unchanged weights give exactly 0. The noise floor, the two causes and, after the
first and the last update, the reasons stand beside it. Prompt and response tokens are kept apart: the paper's
statement is about rollout samples.

The batch measured is the last of `config.steps`; those before it are trained on as usual. At the first batch
AdamW has no moments yet and moves every weight by about the learning rate, whatever the gradient; later
batches show the updates of a run under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.laboratory.attribution import capture_router_inputs
from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.floor import PATHS, noise_floor
from moe_rl.laboratory.observe import RoutedPass, observe
from moe_rl.laboratory.reasons import Before, reasons
from moe_rl.laboratory.rows import Row, table_rows
from moe_rl.laboratory.sums import RESAMPLES
from moe_rl.laboratory.two_causes import two_causes
from moe_rl.laboratory.update_size import moved_row, update_rows
from moe_rl.laboratory.weights import snapshot
from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective
from moe_rl.routing import RoutingError, RoutingTrace, has_routers
from moe_rl.tasks import Task
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import TrainConfig
from moe_rl.training.grading import GuardedTask
from moe_rl.training.groups import Groups, sample_groups
from moe_rl.training.learner import Learner, make_learner
from moe_rl.training.nonfinite import CollapseError
from moe_rl.training.passes import OldPolicy, Plan, old_policy_pass, split
from moe_rl.training.precision import PRECISIONS, compute_in
from moe_rl.training.signal import Signal, learning_signal
from moe_rl.training.update import Update, gradient_update


@dataclass
class DriftOptions:
    """What is measured beside the drift itself, and in which precision."""

    floor: bool = True  # the noise floor: about twice the forwards of everything else
    reasons: bool = (
        True  # attribution, margins, prediction and ratio variance, after the first and last update
    )
    precision: str | None = None  # bfloat16: sampling, passes and updates under autocast, weights in float32
    resamples: int = RESAMPLES  # of the 95 % bootstrap intervals over responses, prompt by prompt

    def check(self) -> None:
        """Raise `ValueError` for options that cannot be."""
        if self.precision not in PRECISIONS:
            raise ValueError(f"drift.precision={self.precision!r}: expected null or bfloat16")
        if self.resamples < 1:
            raise ValueError(f"drift.resamples={self.resamples}: must be at least 1")


@dataclass(frozen=True, eq=False)
class Measurement:
    """What `measure` found.

    tables   rows by table: drift, updates, causes, floor, attribution, margins, prediction, ratio_variance;
             see `rows.COLUMNS`. Those not asked for are absent
    traces   "old" and "update-1" … "update-N": RoutingTrace [B, T], valid on the rows that were compared
    summary  what is worth a line: sizes, reward, the drift after the first and the last update
    """

    tables: dict[str, list[Row]]
    traces: dict[str, RoutingTrace]
    summary: dict[str, object] = field(default_factory=dict)


def phases(config: TrainConfig, options: DriftOptions) -> int:
    """How often `measure` calls `done`."""
    updates = config.optim.minibatches
    reasons = len({1, updates}) if options.reasons else 0
    return config.steps + 1 + updates + reasons + (len(PATHS) if options.floor else 0)


def measure(
    lm: LanguageModel,
    task: Task,
    objective: Objective,
    config: TrainConfig,
    options: DriftOptions,
    done: Callable[[str], None] = lambda phase: None,
) -> Measurement:
    """Train `lm.model` in place up to and through the measured batch; `done` is called after every phase.

    Raises `ValueError` for a dense model, for dynamic sampling, and where no group of the measured batch has
    a reward difference, since the update is then zero; `CollapseError` for an update that is not finite.
    """
    options.check()
    if not has_routers(lm.model):
        raise ValueError("the model has no MoE layers, so there is no drift to measure")
    if config.rollout.refill:
        raise ValueError("rollout.refill joins batches of different widths: not when measuring drift")
    if config.precision is not None:
        raise ValueError("precision is an option of training: drift is measured in drift.precision")
    if config.intervention.active or config.optim.epochs != 1 or config.rollout.length_schedule:
        raise ValueError(
            "intervention, optim.epochs and rollout.length_schedule are options of training: drift is "
            "measured on one pass over a batch, as it is"
        )
    learner = make_learner(lm.model, objective, config)
    task = GuardedTask(task, config.rollout.grading_timeout)
    with compute_in(options.precision, lm.model.device):
        for step in range(1, config.steps):
            rollout = _Rollout.sample(learner, lm, task, step)
            for number in range(1, len(rollout.plan) + 1):
                rollout.update(learner, number)
            done(f"batch {step} trained on")
        rollout = _Rollout.sample(learner, lm, task, config.steps)
        done("responses sampled")
        if not bool(rollout.groups.has_signal_P.any()):
            raise ValueError(
                "the rewards of every group are equal, so that the update would be zero and nothing could "
                "drift: sample more responses, or take an easier task or a longer cold start"
            )
        found = _measure_batch(learner, rollout, options, done)
    errors, first = task.take_errors()
    return replace(found, summary=found.summary | {"grader_errors": errors, "grader_error": first[:1]})


def _measure_batch(
    learner: Learner, rollout: _Rollout, options: DriftOptions, done: Callable[[str], None]
) -> Measurement:
    batch, plan, temperature = rollout.batch, rollout.plan, learner.config.rollout.temperature
    groups_B, resamples = rollout.groups_B, options.resamples
    tables: dict[str, list[Row]] = {"drift": [], "updates": [], "causes": []}
    rows = {"response": batch.routing_rows_BT, "prompt": prompt_rows(batch)}
    compared_BT = rows["response"] | rows["prompt"]
    sampler = rollout.groups.trace
    assert sampler is not None  # `sample` records it
    old, missing = _observed(learner.policy, rollout, temperature)
    done("old policy recorded")
    if options.floor:
        tables["floor"] = list(_floor_rows(learner.policy, rollout, old, rows, temperature, resamples, done))
    before = _before(learner.policy, rollout, old, temperature, options.reasons)
    traces = {"old": old.trace.where(compared_BT)}
    experts: list[float] = []
    for number in range(1, len(plan) + 1):
        subject = str(number)
        update = rollout.update(learner, number)
        new = observe(learner.policy, batch, plan, temperature, scores=old.scores_BTLE is not None)
        traces[f"update-{number}"] = new.trace.where(compared_BT)
        for name, rows_BT in rows.items():
            table = measure_change(old, new, rows_BT, groups_B)
            tables["drift"] += table_rows(table, resamples, subject=subject, rows=name)
            if name == "response":
                experts.append(table.value("experts"))
        tables["updates"] += update_rows(update, old, new, batch, groups_B, resamples, subject)
        tables["updates"].append(moved_row(before.weights, learner.policy, subject))
        tables["causes"] += two_causes(new, old, sampler, batch, groups_B, resamples, subject)
        done(f"update {number}: {experts[-1]:.2%} of experts changed")
        if options.reasons and number in (1, len(plan)):
            found, lacking = reasons(before, learner.policy, new, resamples, subject)
            for name, found_rows in found.items():
                tables.setdefault(name, []).extend(found_rows)
            missing |= lacking
            done(f"reasons of update {number}")
    summary = _summary(rollout, old.trace.layer_ids, experts)
    return Measurement(tables, traces, summary | ({"missing": missing} if missing else {}))


@dataclass(frozen=True, eq=False)
class _Rollout:
    """One rollout batch with what its updates learn from."""

    step: int
    groups: Groups
    plan: Plan
    old: OldPolicy
    signal: Signal

    @property
    def batch(self) -> RolloutBatch:
        return self.groups.batch

    @property
    def groups_B(self) -> Tensor:
        """int64 [B]: the prompt that each response answers."""
        prompts, responses = self.groups.rewards_PG.shape
        return torch.arange(prompts).repeat_interleave(responses)

    @staticmethod
    def sample(learner: Learner, lm: LanguageModel, task: Task, step: int) -> _Rollout:
        """The loop's own steps from prompts to advantages, with the sampler's routing recorded."""
        config = learner.config
        groups = sample_groups(learner, lm, task, step, record=True)
        plan = split(len(groups.batch), config.optim.minibatches, config.optim.microbatch)
        old = old_policy_pass(learner, groups, plan)
        return _Rollout(step, groups, plan, old, learning_signal(learner, groups, old, plan))

    def update(self, learner: Learner, number: int) -> Update:
        """The gradient update on mini-batch `number` of 1, 2, …; `CollapseError` if it is not finite."""
        before = (self.step - 1) * len(self.plan) + number - 1
        minibatch = self.plan[number - 1]
        update = gradient_update(learner, self.batch, self.old, self.signal, minibatch, before)
        if not update.finite:
            raise CollapseError(
                f"collapsed: loss {update.loss} or gradient norm {update.grad_norm} of update {number} of "
                f"batch {self.step} is not finite"
            )
        return update


def prompt_rows(batch: RolloutBatch) -> Tensor:
    """bool [B, T]: rows of prompt tokens, but for the last, whose logits score the first response token."""
    rows_BT = batch.attention_mask_BT.bool().clone()
    rows_BT[:, batch.prompt_length - 1 :] = False
    return rows_BT


def _observed(
    policy: PreTrainedModel, rollout: _Rollout, temperature: float
) -> tuple[RoutedPass, dict[str, str]]:
    """π_old's pass, and what is missing from every table where its family has no scores to record."""
    try:
        return observe(policy, rollout.batch, rollout.plan, temperature), {}
    except RoutingError as error:
        old = observe(policy, rollout.batch, rollout.plan, temperature, scores=False)
        return old, {"gate weights and scores": str(error)}


def _before(
    policy: PreTrainedModel, rollout: _Rollout, old: RoutedPass, temperature: float, with_inputs: bool
) -> Before:
    inputs = None
    if with_inputs:
        with contextlib.suppress(RoutingError):  # `reasons` says so
            inputs = capture_router_inputs(policy, rollout.batch, rollout.plan)
    return Before(snapshot(policy), old, inputs, rollout.batch, rollout.plan, rollout.groups_B, temperature)


def _floor_rows(
    policy: PreTrainedModel,
    rollout: _Rollout,
    old: RoutedPass,
    rows: dict[str, Tensor],
    temperature: float,
    resamples: int,
    done: Callable[[str], None],
) -> Iterator[Row]:
    """The floor on the first mini-batch, by the slices in which `old` was recorded."""
    part = slice(rollout.plan[0][0].start, rollout.plan[0][-1].stop)
    for path in noise_floor(policy, rollout.batch[part], rollout.plan[:1], temperature, old[part]):
        for name, rows_BT in rows.items():
            table = measure_change(path.reference, path.other, rows_BT[part], rollout.groups_B[part])
            yield from table_rows(table, resamples, subject=path.name, rows=name)
        done(f"floor: {path.what}")


def _summary(rollout: _Rollout, layer_ids: tuple[int, ...], experts: list[float]) -> dict[str, object]:
    mask_BT, rewards_PG = rollout.batch.response_mask_BT, rollout.groups.rewards_PG
    return {
        "responses": rewards_PG.numel(),
        "response_tokens": int(mask_BT.sum()),
        "prompt_tokens": rollout.batch.prompt_length,
        "reward": rewards_PG.mean().item(),
        "zero_std_groups": 1.0 - rollout.groups.has_signal_P.float().mean().item(),
        "updates": len(experts),
        "layer_ids": list(layer_ids),
        "experts_changed_first": experts[0],
        "experts_changed_last": experts[-1],
    }
