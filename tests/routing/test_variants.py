"""Replay of the response alone, of what the router still ranks, of old weights; without native routing."""

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing import (
    OldWeights,
    RoutingError,
    RoutingTrace,
    Threshold,
    expert_change,
    find_routers,
    record_routing,
    replay_routing,
    scoring_rows,
)

FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]


def record(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> RoutingTrace:
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    return recorder.trace()


def foreign(trace: RoutingTrace) -> RoutingTrace:
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(*trace.experts.shape[:3], trace.num_experts, generator=generator)
    return dataclasses.replace(trace, experts=noise.argsort(-1)[..., : trace.top_k])


def step(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    (logits.float().log_softmax(-1)[..., 5] * mask).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(left[0], right[0])
    assert [name for name in left[1] if not torch.equal(left[1][name], right[1][name])] == []


# --- the response alone


def test_scoring_rows_are_those_before_the_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]])
    assert scoring_rows(mask).tolist() == [
        [False, True, True, False, False],
        [True, True, True, True, False],
    ]


def test_replay_of_the_response_alone(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    own = record(model, ids, mask)
    response = torch.zeros_like(mask)
    response[:, 7:9] = 1
    trace = foreign(own).where(scoring_rows(response))
    with record_routing(model) as recorder, replay_routing(model, trace) as replay, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    used = recorder.trace()
    assert torch.equal(used.experts[:, 6:8].long(), foreign(own).experts[:, 6:8])
    assert torch.equal(used.experts[:, :6], own.experts[:, :6])  # causal: nothing was forced before row 6
    assert torch.equal(used.experts[:, 8:, 0], own.experts[:, 8:, 0])
    assert replay.native.valid.nonzero()[:, 1].unique().tolist() == [6, 7]


# --- what the router still ranks


def test_a_dropped_slot_gets_the_best_free_native_expert():
    """E = 6, K = 3, scores .3 .25 .2 .15 .06 .04: the K-th score is .2, half of it .1."""
    scores_1E = torch.tensor([[0.3, 0.25, 0.2, 0.15, 0.06, 0.04]])
    native_1K = torch.tensor([[2, 0, 1]])  # a top-k need not be sorted
    for forced, expected in [
        ([0, 1, 2], [0, 1, 2]),
        ([3, 1, 0], [3, 1, 0]),  # .15 >= .1 stays although it is not among the best three
        ([4, 1, 3], [0, 1, 3]),  # 4 is dropped; the best native expert that is free is 0
        ([4, 0, 5], [1, 0, 2]),  # two dropped, in slot order
        ([4, 5, 3], [0, 1, 3]),
    ]:
        chosen = Threshold(0.5).choose(
            torch.tensor([forced]), native_1K, lambda ids_NK: scores_1E.gather(1, ids_NK)
        )
        assert chosen.tolist() == [expected]


def test_a_negative_kth_score_keeps_what_is_at_least_as_high():
    scores_1E = torch.tensor([[0.1, -0.2, -0.21, -0.1, -0.9]])  # K-th score of top-3: -.2
    native_1K = torch.tensor([[0, 3, 1]])
    chosen = Threshold(0.5).choose(
        torch.tensor([[2, 1, 4]]), native_1K, lambda ids_NK: scores_1E.gather(1, ids_NK)
    )
    assert chosen.tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_threshold_follows_its_definition(build, batch, family):
    """By a loop over rows, on the scores of the first layer's router."""
    model = build(family)
    ids, mask = batch
    trace = foreign(record(model, ids, mask))
    seen: dict[str, Tensor] = {}
    router = find_routers(model)[0].module
    hook = router.register_forward_hook(
        lambda module, args, output: seen.update(logits=output[0], used=output[2])
    )
    with replay_routing(model, trace, variant=Threshold(0.4)) as replay, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    hook.remove()
    # DeepSeek's selection bias is zero here
    score = torch.sigmoid if family == "deepseek_v3" else torch.nn.Softmax(-1)
    scores_NE = score(seen["logits"].float())
    native_NK = replay.native.experts[:, :, 0].flatten(0, 1).long()
    kept_somewhere = dropped_somewhere = False
    for row in trace.valid.flatten().nonzero().flatten().tolist():
        score_E = scores_NE[row].tolist()
        native = sorted(native_NK[row].tolist(), key=score_E.__getitem__, reverse=True)
        forced = trace.experts[:, :, 0].flatten(0, 1)[row].tolist()
        kept = [expert if score_E[expert] >= 0.4 * score_E[native[-1]] else None for expert in forced]
        free = iter([expert for expert in native if expert not in kept])
        expected = [next(free) if expert is None else expert for expert in kept]
        assert seen["used"][row].tolist() == expected
        kept_somewhere |= any(expert is not None and expert not in native for expert in kept)
        dropped_somewhere |= None in kept
    assert kept_somewhere and dropped_somewhere


@pytest.mark.parametrize("family", FAMILIES)
def test_threshold_between_replay_and_native_routing(build, batch, family):
    model = build(family)
    ids, mask = batch
    own = record(model, ids, mask)
    plain = step(model, ids, mask)
    with replay_routing(model, own, variant=Threshold(1.0)) as replay:  # nothing to drop
        assert_same(plain, step(model, ids, mask))
    assert replay.replaced == 0
    trace = foreign(own)
    with replay_routing(model, trace) as replay:
        forced = step(model, ids, mask)
    assert replay.replaced == 0
    with replay_routing(model, trace, variant=Threshold(1e-30)):  # nothing is that improbable
        assert_same(forced, step(model, ids, mask))
    shares = []
    for ratio in (0.1, 0.5, 1.0):
        with (
            record_routing(model) as recorder,
            replay_routing(model, trace, variant=Threshold(ratio)) as replay,
        ):
            step(model, ids, mask)
        used = recorder.trace()
        dataclasses.replace(used).validate()  # no id twice
        assert torch.equal(replay.used.experts, used.experts)
        assert replay.replaced == expert_change(trace, used).experts
        shares.append(replay.replaced)
    assert 0 < shares[0] < shares[1] < shares[2]
    if family != "deepseek_v3":  # whose groups the threshold does not apply
        assert expert_change(used, replay.native).experts == 0  # at 1 the set is the router's own


def test_threshold_looks_past_expert_groups(build, batch):
    """DeepSeek-V3 masks the groups it did not choose; a high score there is a high score."""
    model = build("deepseek_v3")
    ids, mask = batch
    trace = record(model, ids, mask)
    experts = trace.experts.clone()
    seen: dict[str, Tensor] = {}
    router = find_routers(model)[0].module
    hook = router.register_forward_hook(lambda module, args, output: seen.update(logits=output[0]))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    hook.remove()
    best_NK = seen["logits"].topk(2).indices  # without groups
    experts[:, :, 0] = best_NK.view(3, 10, 2).to(experts.dtype)
    outside = expert_change(trace, dataclasses.replace(trace, experts=experts)).by_layer[0]
    assert outside > 0
    wanted = dataclasses.replace(trace, experts=experts)
    with replay_routing(model, wanted, variant=Threshold(0.999)) as replay, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    assert expert_change(wanted, replay.used).by_layer[0] < outside


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_threshold_under_gradient_checkpointing(build, batch, use_reentrant):
    model = build("qwen3_moe").train()
    trace = foreign(record(model, *batch))
    with replay_routing(model, trace, variant=Threshold(0.5)):
        expected = step(model, *batch)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with replay_routing(model, trace, variant=Threshold(0.5)):
        assert_same(expected, step(model, *batch))


def test_thresholds_that_say_nothing_raise(build, batch):
    model = build("qwen3_moe")
    trace = record(model, *batch)
    for ratio in (0.0, -1.0, 1.5):
        with pytest.raises(RoutingError, match=r"min_ratio must be in \(0, 1\]"):
            Threshold(ratio)
    with pytest.raises(RoutingError, match="leave native=True"):
        replay_routing(model, trace, variant=Threshold(0.5), native=False)
    replay = replay_routing(model, trace, variant=Threshold(0.5))
    with pytest.raises(RoutingError, match="no complete forward ran"):
        _ = replay.replaced


# --- old weights


@pytest.mark.parametrize("family", FAMILIES)
def test_old_weights_and_old_experts_are_the_old_forward(build, batch, family):
    model = build(family)
    ids, mask = batch
    with record_routing(model, weights=True) as recorder, torch.no_grad():
        old_logits = model(input_ids=ids, attention_mask=mask).logits
    trace, weights = recorder.trace(), recorder.weights()
    assert weights.shape == trace.experts.shape
    assert (weights[~trace.valid] == 0).all() and (weights[trace.valid] > 0).all()
    with torch.no_grad():
        for router in find_routers(model):
            router.module.weight.mul_(0.5)
    logits, gradients = {}, {}
    for name, variant in {"current": None, "old": OldWeights(weights)}.items():
        with replay_routing(model, trace, variant=variant):
            logits[name], gradients[name] = step(model, ids, mask)
    valid = mask.bool()
    assert torch.equal(logits["old"][valid], old_logits[valid])
    assert not torch.equal(logits["current"][valid], old_logits[valid])
    for router in find_routers(model):  # constants carry no gradient to the router
        weight = f"{router.name}.weight"
        assert gradients["current"][weight].abs().max() > 0
        assert weight not in gradients["old"] or gradients["old"][weight].abs().max() == 0


def test_gate_weights_join_over_decode_steps(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    with record_routing(model, weights=True) as recorder:
        sequences = model.generate(ids, attention_mask=mask, **options)
    mask = torch.cat([mask, torch.ones(3, 4, dtype=mask.dtype)], dim=1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with record_routing(model, weights=True) as forced, torch.no_grad():
        model(input_ids=sequences, attention_mask=mask, position_ids=position_ids)
    assert torch.allclose(recorder.weights(), forced.weights()[:, :13], atol=1e-5)
    assert torch.allclose(recorder.weights().sum(-1)[mask[:, :13].bool()], torch.ones(()))


def test_old_weights_that_do_not_fit_raise(build, batch):
    model = build("qwen3_moe")
    with record_routing(model, weights=True) as recorder, torch.no_grad():
        model(input_ids=batch[0], attention_mask=batch[1])
    trace, weights = recorder.trace(), recorder.weights()
    with pytest.raises(RoutingError, match=r"\[3, 10, 2, 2\].*got torch.float32 \[3, 9, 2, 2\]"):
        replay_routing(model, trace, variant=OldWeights(weights[:, 1:]))
    with pytest.raises(RoutingError, match="not finite in a valid row"):
        replay_routing(model, trace, variant=OldWeights(weights / 0))
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=batch[0])
    with pytest.raises(RoutingError, match="weights=True"):
        recorder.weights()


# --- without native routing


@pytest.mark.parametrize("family", FAMILIES)
def test_without_native_routing_nothing_else_changes(build, batch, family):
    model = build(family)
    ids, mask = batch
    for trace in (record(model, ids, mask), foreign(record(model, ids, torch.ones_like(mask)))):
        for part in (trace, trace.where(torch.rand(3, 10) > 0.5)):
            with replay_routing(model, part):
                expected = step(model, ids, mask)
            with replay_routing(model, part, native=False) as replay:
                assert_same(expected, step(model, ids, mask))
            with pytest.raises(RoutingError, match="native=False"):
                _ = replay.native
    assert replay.hits == len(trace.layer_ids)


def test_without_native_routing_wrong_rows_still_raise(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    trace = record(model, ids, mask)
    block = model.model.layers[1].mlp
    hook = block.register_forward_pre_hook(lambda module, args: (args[0][:, 1:].contiguous(),))
    refused = pytest.raises(RoutingError, match="27 rows in a forward of B x T = 3 x 10")
    with refused, replay_routing(model, trace, native=False):
        model(input_ids=ids, attention_mask=mask)
    hook.remove()
