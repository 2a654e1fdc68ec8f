"""Replay follows the trace, takes its weights from the current router, and refuses what it cannot follow."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing import RoutingError, RoutingTrace, find_routers, record_routing, replay_routing

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"]


def record(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> RoutingTrace:
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    return recorder.trace()


def foreign(trace: RoutingTrace, seed: int = 7) -> RoutingTrace:
    """Other experts for every row, drawn uniformly without repetition."""
    noise = torch.rand(
        *trace.experts.shape[:3], trace.num_experts, generator=torch.Generator().manual_seed(seed)
    )
    return dataclasses.replace(trace, experts=noise.argsort(-1)[..., : trace.top_k])


def step(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and all gradients of a language-modelling loss."""
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    logp = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    (logp * mask[:, 1:]).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(left[0], right[0])
    assert left[1].keys() == right[1].keys()
    for name in left[1]:
        assert torch.equal(left[1][name], right[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_trace_is_bitwise_the_plain_forward(build, batch, family, dtype):
    model = build(family, dtype=dtype)
    plain = step(model, *batch)
    with record_routing(model) as recorder:
        recorded = step(model, *batch)
    trace = recorder.trace()
    with replay_routing(model, trace) as replay:
        replayed = step(model, *batch)
    assert_same(plain, recorded)
    assert_same(plain, replayed)
    assert torch.equal(replay.native.experts, trace.experts)
    assert torch.equal(replay.native.valid, trace.valid)
    assert replay.hits == len(trace.layer_ids)
    for router in find_routers(model):
        assert plain[1][f"{router.name}.weight"].abs().max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_trace_reaches_the_experts(build, batch, family):
    model = build(family)
    ids, mask = batch
    own = record(model, ids, mask)
    trace = foreign(own)
    inputs = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: inputs.append(args))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    with replay_routing(model, trace) as replay:
        logits, gradients = step(model, ids, mask)
    for hook in hooks:
        hook.remove()
    assert len(inputs) == len(trace.layer_ids)
    for layer, (_, ids_NK, weights_NK) in enumerate(inputs):
        sent = ids_NK.view(*trace.valid.shape, -1)
        assert torch.equal(sent[trace.valid], trace.experts[:, :, layer][trace.valid])
        assert (weights_NK[trace.valid.flatten()] > 0).all()
    for router in find_routers(model):
        assert gradients[f"{router.name}.weight"].abs().max() > 0
    # The first MoE layer sees what it saw before, the later ones do not.
    first = replay.native.experts[:, :, 0]
    assert torch.equal(first, own.experts[:, :, 0])
    assert not torch.equal(logits, step(model, ids, mask)[0])


def gate_weights(family: str, model: PreTrainedModel, hidden_ND: Tensor, ids_NK: Tensor) -> Tensor:
    """The paper formula of each family's gate, at given ids."""
    router = find_routers(model)[0].module
    logits_NE = hidden_ND.float() @ router.weight.float().T
    if family == "gpt_oss":
        return (logits_NE + router.bias).gather(1, ids_NK).softmax(1)
    if family == "deepseek_v3":
        scores_NK = logits_NE.sigmoid().gather(1, ids_NK)
        return scores_NK / scores_NK.sum(1, keepdim=True) * model.config.routed_scaling_factor
    probs_NK = logits_NE.softmax(1).gather(1, ids_NK)
    return probs_NK if family == "olmoe" else probs_NK / probs_NK.sum(1, keepdim=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_weights_are_the_current_scores_with_the_family_formula(build, batch, family):
    model = build(family)
    ids, mask = batch
    trace = foreign(record(model, ids, mask))
    with torch.no_grad():  # the router moves on after the recording
        find_routers(model)[0].module.weight.add_(0.3)
    seen = {}
    router = find_routers(model)[0].module
    hook = router.register_forward_hook(
        lambda module, args, output: seen.update(hidden=args[0], output=output)
    )
    with replay_routing(model, trace), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    hook.remove()
    rows = trace.valid.flatten()
    forced = trace.experts[:, :, 0].flatten(0, 1)
    expected = gate_weights(family, model, seen["hidden"].flatten(0, -2), forced)
    assert torch.allclose(seen["output"][1][rows], expected[rows], atol=1e-6)
    assert torch.equal(seen["output"][2][rows], forced[rows])


def test_rows_that_are_not_valid_route_natively(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    own = record(model, ids, torch.ones_like(mask))
    keep = torch.zeros(3, 10, dtype=torch.bool)
    keep[1, 4] = True
    with record_routing(model) as recorder, replay_routing(model, foreign(own).where(keep)), torch.no_grad():
        model(input_ids=ids)
    used = recorder.trace()
    assert torch.equal(used.experts[1, 4], foreign(own).experts[1, 4].to(torch.uint8))
    assert torch.equal(used.experts[:, :, 0][~keep], own.experts[:, :, 0][~keep])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_gradient_checkpointing(build, batch, family, use_reentrant):
    model = build(family).train()
    ids, mask = batch
    trace = foreign(record(model, ids, mask))
    with replay_routing(model, trace):
        expected = step(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with record_routing(model) as recorder, replay_routing(model, trace) as replay:
        checkpointed = step(model, ids, mask)
    assert_same(expected, checkpointed)
    assert replay.hits == replay.recomputes == len(trace.layer_ids)
    used = recorder.trace()  # one recording: the recompute is not another
    assert torch.equal(used.experts[trace.valid], trace.experts[trace.valid].to(torch.uint8))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_leaving_before_the_checkpointed_backward_raises(build, batch, use_reentrant):
    model = build("qwen3_moe").train()
    ids, mask = batch
    trace = record(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with pytest.raises(RoutingError, match="until after every backward"), replay_routing(model, trace):
        model(input_ids=ids, attention_mask=mask)
    with replay_routing(model, trace), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)


def test_several_forwards_before_one_backward(build, batch):
    model = build("qwen3_moe").train()
    ids, mask = batch
    trace = foreign(record(model, ids, mask))
    with replay_routing(model, trace):
        expected = step(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    with replay_routing(model, trace) as replay:
        losses = []
        for _ in range(2):
            logits = model(input_ids=ids, attention_mask=mask).logits
            logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
            losses.append((logp * mask[:, 1:]).sum())
        sum(losses).backward()
    assert replay.hits == replay.recomputes == 2 * len(trace.layer_ids)
    for name, parameter in model.named_parameters():
        if name in expected[1]:
            assert torch.allclose(parameter.grad, 2 * expected[1][name], rtol=1e-5, atol=1e-7), name


def token_loss(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return (logits.float().log_softmax(-1)[..., 5] * mask).sum()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_leaving_before_the_second_of_two_checkpointed_backwards_raises(build, batch, use_reentrant):
    model = build("qwen3_moe").train()
    trace = record(model, *batch)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    refused = pytest.raises(RoutingError, match=r"1 of 2 forwards .* until after every backward")
    with refused, replay_routing(model, trace):
        first, second = token_loss(model, *batch), token_loss(model, *batch)
        (first if use_reentrant else second).backward()
    with replay_routing(model, trace) as replay:
        first, second = token_loss(model, *batch), token_loss(model, *batch)
        first.backward()
        second.backward()
    assert replay.recomputes == 4


@pytest.mark.parametrize("implementation", ["REENTRANT", "NO_REENTRANT"])
def test_layers_that_the_user_checkpoints(build, batch, implementation):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model = build("qwen3_moe").train()
    trace = foreign(record(model, *batch))
    with replay_routing(model, trace):
        token_loss(model, *batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl[implementation])
    with replay_routing(model, trace):
        token_loss(model, *batch).backward()
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "")
        assert (parameter.grad is None) == (expected[plain] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, expected[plain])
    with pytest.raises(RoutingError, match="1 of 1 forwards"), replay_routing(model, trace):
        token_loss(model, *batch)


def test_micro_batches(build, batch):
    model = build("olmoe")
    ids, mask = batch
    trace = foreign(record(model, ids, mask))
    with replay_routing(model, trace), torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
    for rows in ([2], [0, 1]):
        with replay_routing(model, trace[rows]), torch.no_grad():
            part = model(input_ids=ids[rows], attention_mask=mask[rows]).logits
        assert torch.allclose(part[mask[rows].bool()], whole[rows][mask[rows].bool()], atol=1e-5)


def test_leaving_without_a_forward_raises(build, batch):
    model = build("qwen3_moe")
    trace = record(model, *batch)
    with pytest.raises(RoutingError, match=r"layers \[1, 2\]"), replay_routing(model, trace):
        pass
    with pytest.raises(KeyError), replay_routing(model, trace):  # an error in flight is not replaced
        raise KeyError


def test_a_layer_never_reached_raises(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    trace = record(model, ids, mask)
    block = model.model.layers[2].mlp
    hook = block.gate.register_forward_pre_hook(lambda module, args: None)
    block.forward = lambda hidden: hidden
    with pytest.raises(RoutingError, match=r"layers \[2\]"), replay_routing(model, trace) as replay:
        model(input_ids=ids, attention_mask=mask)
    assert replay.hits == 1
    hook.remove()


def test_forwards_that_do_not_fit_the_trace_raise(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    trace = record(model, ids, mask)
    with pytest.raises(RoutingError, match=r"\[3, 10\].*\[2, 10\]"), replay_routing(model, trace):
        model(input_ids=ids[:2], attention_mask=mask[:2])
    cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
    longer = torch.cat([mask, torch.ones(3, 10, dtype=mask.dtype)], dim=1)
    with pytest.raises(RoutingError, match="holds 10 rows"), replay_routing(model, trace):
        model(input_ids=ids, attention_mask=longer, past_key_values=cache)
    with pytest.raises(RoutingError, match="outside a forward"), replay_routing(model, trace):
        model.model.layers[1].mlp(torch.randn(3, 10, 32))


def test_traces_that_are_damaged_or_of_another_model_raise(build, batch):
    model = build("qwen3_moe")
    trace = record(model, *batch)

    def changed(**changes) -> RoutingTrace:
        return dataclasses.replace(trace, **changes)

    experts = trace.experts.clone()
    experts[0, 3, 1] = 8
    with pytest.raises(RoutingError, match=r"layer 2 holds .* to 8"):
        replay_routing(model, changed(experts=experts))
    experts = trace.experts.clone()
    experts[0, 3, 1] = 5
    with pytest.raises(RoutingError, match="same expert twice in layer 2"):
        replay_routing(model, changed(experts=experts))
    experts = trace.experts.clone()
    experts[:, :, 0] = 0
    with pytest.raises(RoutingError, match="layer 1 holds expert 0 in every slot"):
        replay_routing(model, changed(experts=experts))
    with pytest.raises(RoutingError, match=r"routes layers \(0, 2\)"):
        replay_routing(model, changed(layer_ids=(0, 2)))
    with pytest.raises(RoutingError, match="selects 2 of 16 experts, the model 2 of 8"):
        replay_routing(model, changed(num_experts=16))
    with pytest.raises(RoutingError, match="selects 1 of 8 experts, the model 2"):
        replay_routing(model, changed(experts=trace.experts[..., :1]))
    with pytest.raises(RoutingError, match="selects 2 of 8 experts, the model 3"):
        replay_routing(build("olmoe"), trace)
    # What a damaged row holds does not matter where the row is not valid.
    experts = trace.experts.clone()
    experts[1, 0] = 200
    replay_routing(model, changed(experts=experts))


def test_a_trace_without_a_valid_row_raises(build, batch):
    """A mask that went wrong must not pass for replay."""
    model = build("qwen3_moe")
    trace = record(model, *batch)
    with pytest.raises(RoutingError, match="no row of the trace is valid"):
        replay_routing(model, trace.where(torch.zeros(3, 10)))
    with pytest.raises(RoutingError, match="no row of the trace is valid"):
        replay_routing(model, trace[[]])


def test_a_copy_made_inside_a_context_is_independent(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).logits
    trace = foreign(record(model, ids, mask))
    with record_routing(model) as recorder, replay_routing(model, trace), torch.no_grad():
        forced = model(input_ids=ids, attention_mask=mask).logits
        clone = copy.deepcopy(model)
        for router in find_routers(model):
            router.module.weight.zero_()
        assert torch.equal(clone(input_ids=ids, attention_mask=mask).logits, plain)
        assert len(recorder.traces()) == 1
    assert not torch.equal(forced, plain)
    assert {type(router.module).__name__ for router in find_routers(clone)} == {"Qwen3MoeTopKRouter"}
    with replay_routing(clone, trace), torch.no_grad():
        assert torch.equal(clone(input_ids=ids, attention_mask=mask).logits, forced)


def test_a_model_pickled_inside_a_context_is_the_plain_model(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).logits
    trace = foreign(record(model, ids, mask))
    file = io.BytesIO()
    with record_routing(model) as recorder, replay_routing(model, trace), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        torch.save(model, file)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(input_ids=ids, attention_mask=mask).logits, plain)
        assert len(recorder.traces()) == 1
    assert {type(router.module).__name__ for router in find_routers(loaded)} == {"Qwen3MoeTopKRouter"}
    assert b"moe_rl.routing.replay" not in file.getvalue()  # of the context only hooks without effect


def test_two_models_side_by_side(build, batch):
    first, second = build("qwen3_moe", seed=0), build("qwen3_moe", seed=1)
    ids, mask = batch
    one, two = record(first, ids, mask), record(second, ids, mask)
    by_first, by_second = record_routing(first), record_routing(second)
    with torch.no_grad(), replay_routing(first, two), replay_routing(second, one), by_first, by_second:
        first(input_ids=ids, attention_mask=mask)
        second(input_ids=ids, attention_mask=mask)
    assert torch.equal(by_first.trace().experts, two.experts)
    assert torch.equal(by_second.trace().experts, one.experts)


def test_contexts_nest_in_any_order_and_leave_nothing(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    trace = foreign(record(model, ids, mask))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    recorder, replay = record_routing(model), replay_routing(model, trace)
    recorder.__enter__()
    replay.__enter__()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(RoutingError, match="already replays"), replay_routing(model, trace):
        pass
    recorder.__exit__(None, None, None)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    replay.__exit__(None, None, None)
    assert replay.hits == 4
    used = recorder.trace()
    assert torch.equal(used.experts[used.valid], trace.experts[trace.valid].to(torch.uint8))
    assert classes == {name: type(module) for name, module in model.named_modules()}
    for name, module in model.named_modules():
        after = vars(module)
        assert after.keys() == before[name].keys()
        assert not after["_forward_hooks"] and not after["_forward_pre_hooks"]
        assert not after["_forward_hooks_always_called"] and not after["_forward_pre_hooks_with_kwargs"]


def test_a_trace_that_knows_its_tokens_is_not_replayed_on_others(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    trace = record(model, ids, mask).for_tokens(ids, mask)
    with replay_routing(model, trace) as replay:
        model(input_ids=ids, attention_mask=mask)
    assert replay.hits
    swapped = ids.flip(0)
    with pytest.raises(RoutingError, match="recorded on other tokens"), replay_routing(model, trace):
        model(input_ids=swapped, attention_mask=mask.flip(0))
