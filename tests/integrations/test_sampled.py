"""The sampler's routing in TRL's trainer: from `generate`, and from stand-ins for what vLLM returns.

vLLM itself was not run. Structures: CompletionOutput.routed_experts is [tokens - 1, num_hidden_layers, K] of
prompt and completion, uint8 up to 256 experts (vLLM's documentation, training/routed_experts).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt -e '.[trl]'")
from test_trainer import COMPARED, OFF_POLICY, Watched, column, trained
from trainers import completion, fixed_rollout
from trl.trainer import grpo_trainer

from moe_rl.integrations.carried import FORCED, OLD, sequences, take_trace
from moe_rl.integrations.sampled import from_engine, own_share, returning_routed_experts
from moe_rl.routing import RoutingError, expert_change, record_routing
from moe_rl.routing.formats import ModelRouting


def payload(model, ids):
    """What vLLM would return for a sequence: the routing of every token but the last, which it sampled."""
    with torch.no_grad(), record_routing(model) as recorder:
        model(input_ids=torch.tensor([ids]))
    return recorder.trace().experts[0, :-1].numpy().astype(np.uint8)


def routed_rollout(prompts, trainer):
    output = fixed_rollout(prompts, trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    whole = [p + c for p, c in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
    return output | {"routed_experts": [payload(model, ids) for ids in whole]}


def test_a_rollout_func_that_returns_routing(trainer):
    """An engine that routes as the trainer does: rollout replay is old-policy replay, to rounding."""
    expected = trained(trainer(replay="old_policy", **OFF_POLICY))
    built = trainer(cls=Watched, replay="rollout", **OFF_POLICY | {"rollout_func": routed_rollout})
    found = trained(built)
    for name in COMPARED:
        assert column(found, name) == pytest.approx(column(expected, name), rel=1e-4, abs=1e-6), name
    batch = built.rollouts[0][0]
    forced, mask = take_trace(batch, FORCED, built._layout), sequences(batch)[1].bool()
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    assert torch.equal(forced.valid, mask & ~last)  # the token that was sampled last was never routed


def test_a_rollout_func_without_routing_is_refused(trainer):
    with pytest.raises(RoutingError, match=r"returned only .*'completion_ids'.*enable_return_routed_experts"):
        trainer(replay="rollout", **OFF_POLICY).train()


def test_payloads_of_other_tokens_are_refused(trainer):
    def short(prompts, trainer):
        output = routed_rollout(prompts, trainer)
        output["routed_experts"][3] = output["routed_experts"][3][:-2]
        return output

    with pytest.raises(RoutingError, match="rows"):
        trainer(replay="rollout", **OFF_POLICY | {"rollout_func": short}).train()


def test_generate_is_recorded_row_by_row(trainer):
    """The rows of `generate`, prompts padded on the left, are those of the teacher-forced forward."""
    built = trainer(cls=Watched, replay="rollout", steps_per_generation=2, num_iterations=2, max_steps=1)
    built.train()
    for batch in built.rollouts[0]:
        forced, old = (take_trace(batch, name, built._layout) for name in (FORCED, OLD))
        mask = sequences(batch)[1].bool()
        missing = (mask & ~forced.valid).sum(-1)  # the last token, unless others were longer and it was read
        assert missing.max() == 1 and not bool((forced.valid & ~mask).any())
        assert expert_change(forced, old).experts == 0


def test_masked_completions_are_placed_by_their_tokens():
    """A truncated completion that TRL masks keeps its prompt's rows, and loses its own."""
    routing = ModelRouting(num_hidden_layers=2, moe_layer_ids=(1,), num_experts=4, top_k=1)
    rows = [np.array([[[0], [k]] for k in ids], np.uint8) for ids in ([1, 2, 3, 1], [3, 2])]
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]])  # the second completion is masked
    trace = from_engine(rows, routing, [[7, 7], [7, 7]], [[5, 5, 5], [5]])(mask, 3)
    assert trace.valid.tolist() == [[False, True, True, True, True, False], [False, True, True] + [False] * 3]
    assert trace.experts[0, :, 0, 0].tolist() == [0, 1, 2, 3, 1, 0]
    assert trace.experts[1, :, 0, 0].tolist() == [0, 3, 2, 0, 0, 0]


class StandInLLM:
    """vLLM's LLM as far as TRL and the capture see it: RequestOutputs with one completion each."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.seen = model, tokenizer, {}

    def generate(self, prompts, **_):
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            index = self.seen[tuple(ids)] = self.seen.get(tuple(ids), -1) + 1
            made = completion(ids, index, len(self.tokenizer))
            routed = payload(self.model, ids + made)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=made, routed_experts=routed)]))
        return outputs


class StandInEngine:
    """TRL's VLLMGeneration: it calls the LLM, and passes tokens and log-probabilities on alone."""

    tensor_parallel_size = 1

    def __init__(self, model, processing_class, **_):
        self.llm = StandInLLM(model, processing_class)

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
        made = [output.outputs[0].token_ids for output in outputs]
        return prompts, made, [[[-1.0]] * len(ids) for ids in made], None


def test_colocated_vllm_hands_its_routing_on(trainer, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", StandInEngine)
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    options |= {name: value for name, value in OFF_POLICY.items() if name != "rollout_func"}
    found = trained(trainer(replay="rollout", **options))
    expected = trained(trainer(replay="old_policy", **OFF_POLICY))
    for name in COMPARED:
        assert column(found, name) == pytest.approx(column(expected, name), rel=1e-4, abs=1e-6), name
    with pytest.raises(ValueError, match="server returns no routed experts"):
        trainer(replay="rollout", **options | {"vllm_mode": "server"})


def test_trls_own_engine_is_asked_for_routing():
    module = SimpleNamespace(LLM=lambda **options: options)
    plain = module.LLM
    with returning_routed_experts(module):
        assert module.LLM(model="m") == {"model": "m", "enable_return_routed_experts": True}
    assert module.LLM is plain


def test_a_tensor_parallel_group_shares_its_outputs():
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=k)]) for k in range(4)]
    assert [own_share(outputs, 2, rank) for rank in range(4)] == [[0, 1], [2, 3]] * 2
