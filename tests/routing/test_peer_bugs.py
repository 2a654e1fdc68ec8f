"""What went wrong in other projects' routing replay, and the test that keeps it out of this one.

Projects and numbers are those of their public issues and pull requests. Tests without a file are below.
"""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.routing import RoutingError, RoutingTrace, find_routers, record_routing, replay_routing

TESTS = {
    "replay does nothing where the decoder was built twice (verl 7340, miles 2570)": [
        "test_a_model_that_was_built_before_does_not_take_the_replay",
        "test_an_orphan_decoder_is_refused",
    ],
    "a global list leaks from one model to the next (Megatron-LM 2693)": [
        "test_replay.py::test_two_models_side_by_side",
        "test_replay.py::test_contexts_nest_in_any_order_and_leave_nothing",
    ],
    "forward-only passes leave stale entries (SkyRL 1908)": [
        "test_forward_only_passes_leave_nothing_stale",
        "test_replay.py::test_several_forwards_before_one_backward",
    ],
    "a queue is wrong when backwards come in another order (AReaL 1166)": [
        "test_backwards_in_any_order",
        "test_families.py::test_replay_under_gradient_checkpointing",
    ],
    "dense first layers shift all others (verl 5037, 5452)": [
        "test_record.py::test_one_forward",
        "formats/test_engines.py::test_layers_shifted_by_one_are_refused_by_the_dense_layer_they_land_on",
    ],
    "an id twice in a row crashes the dispatch (verl 4986, miles 1002)": [
        "test_replay.py::test_traces_that_are_damaged_or_of_another_model_raise",
        "test_variants.py::test_threshold_between_replay_and_native_routing",
        "formats/test_round_trip.py::test_an_expert_chosen_twice_is_refused",
    ],
    "all padding goes to experts 0 to K - 1 (prime-rl 3350, SkyRL 2091, slime 2308, miles 2697, verl 7524)": [
        "test_replay.py::test_rows_that_are_not_valid_route_natively",
    ],
    "uint8 holds 512 experts (prime-rl 3051)": [
        "test_record.py::test_more_than_256_experts_are_int16",
        "formats/test_engines.py::test_uint8_for_512_experts_is_refused_as_wrapped",
    ],
    "ids wrap or lack operations in their dtype (ms-swift 9981, NeMo-RL 4240, prime-rl 2487)": [
        "test_trace.py::test_the_smallest_dtype_that_torch_supports",
        "formats/test_trainers.py::test_int8_ids_of_more_than_128_experts_are_refused",
    ],
    "multi-token prediction layers alias decoder layers (vLLM 48622, NeMo-RL 3903, miles 619, 2226)": [
        "test_situations.py::test_multi_token_prediction_heads_are_left_out",
        "formats/test_engines.py::test_a_draft_layer_that_aliases_a_decoder_layer_is_refused",
    ],
    "a capture bound too early holds zeros, or physical ids (vLLM 33013)": [
        "test_replay.py::test_traces_that_are_damaged_or_of_another_model_raise",
        "formats/test_round_trip.py::test_zeros_of_a_capture_that_never_ran_are_refused",
        "formats/test_round_trip.py::test_physical_ids_are_refused",
    ],
    "a monolithic kernel skips the hook (vLLM 44116, 54730)": [
        "test_a_block_that_skips_its_router_is_no_recording",
        "test_situations.py::test_fused_kernels_are_refused",
        "test_replay.py::test_a_layer_never_reached_raises",
    ],
    "rows of a hybrid or prefix cache are zero (vLLM 35744, verl 6922)": [
        "test_families.py::test_generate_joins_to_the_teacher_forced_recording",
        "test_record.py::test_rows_cached_before_the_recording_are_not_valid",
    ],
    "aborted requests lose or shift rows (vLLM 37094, 39568, 39917)": [
        "test_record.py::test_a_forward_that_raised_leaves_no_rows",
        "formats/test_round_trip.py::test_lost_rows_are_refused_not_shifted",
        "formats/test_round_trip.py::test_a_batch_of_aborted_requests_is_refused",
    ],
    "a truncated response keeps its full routes (verl 6027, 6089)": [
        "test_record.py::test_generate_joins_decode_steps",
        "formats/test_trainers.py::test_a_truncated_response_with_the_routes_of_the_full_one_is_refused",
    ],
    "a later turn overwrites the routes of older weights (verl 6029, 6054, 7158)": [
        "test_a_second_turn_keeps_the_routes_of_the_first",
    ],
    "the last sampled token has no route (prime-rl 1807, NeMo-RL 3485)": [
        "test_record.py::test_generate_joins_decode_steps",
        "formats/test_trainers.py::test_the_dummy_route_of_nemo_rl_is_never_kept_as_the_last_token",
    ],
    "an engine ignores the start it was asked for (strands-sglang 72, sglang 36404)": [
        "formats/test_engines.py::test_an_engine_that_ignored_start_is_refused_not_shifted",
    ],
    "a fused shared expert adds a column (sglang 24403, 38963)": [
        "formats/test_engines.py::test_a_fused_shared_expert_column_in_flat_ids_is_refused",
        "test_replay.py::test_traces_that_are_damaged_or_of_another_model_raise",
    ],
    "rows are of other positions under context parallelism (ms-swift 9799, 9804)": [
        "test_trace.py::test_other_tokens_are_told",
        "test_replay.py::test_forwards_that_do_not_fit_the_trace_raise",
    ],
    "packed rows shift, layers are unsorted (verl 7106, 7805)": [
        "test_situations.py::test_packed_sequences",
        "test_routers.py::test_layers_are_ordered_by_number",
        "formats/test_megatron.py::test_unsorted_layers_of_interleaved_stages_are_sorted_by_id",
    ],
    "traces fill the memory of the host (prime-rl 2796, NeMo-RL 3292, slime 2384)": [
        "test_storage.py::test_files_cost_their_bits",
        "test_trace.py::test_the_smallest_dtype_that_torch_supports",
    ],
    "weights come from masked scores and are zero (ISEEKYAN/Megatron-LM 79, 49)": [
        "test_families.py::test_a_foreign_trace_is_followed",
        "test_replay.py::test_gate_weights_are_the_current_scores_with_the_family_formula",
    ],
    "a recompute flips a near-tie (Automodel 3156)": [
        "test_a_recompute_that_would_flip_keeps_the_experts",
    ],
    "the flag is on, nothing is replayed, or two replays conflict (prime-rl 2738, slime 1909, verl 4973)": [
        "test_replay.py::test_leaving_without_a_forward_raises",
        "test_replay.py::test_a_trace_without_a_valid_row_raises",
        "test_replay.py::test_contexts_nest_in_any_order_and_leave_nothing",
    ],
    "the critic or the teacher is replayed too (slime 1187, NeMo-RL 4083)": [
        "test_a_reference_that_runs_inside_routes_by_itself",
        "test_replay.py::test_a_copy_made_inside_a_context_is_independent",
    ],
}


def record(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> RoutingTrace:
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    return recorder.trace()


def shifted(trace: RoutingTrace) -> RoutingTrace:
    """Experts e + 1 modulo E: a trace that differs in every slot and stays valid."""
    return RoutingTrace(
        (trace.experts.long() + 1) % trace.num_experts, trace.valid, trace.layer_ids, trace.num_experts
    )


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits
    return (logits.log_softmax(-1)[..., 5] * mask).sum()


def test_every_bug_names_tests_that_exist():
    folder = Path(__file__).parent
    assert len(TESTS) == 26
    for bug, names in TESTS.items():
        for name in names:
            file, _, function = name.rpartition("::")
            tree = ast.parse((folder / (file or Path(__file__).name)).read_text())
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in defined, f"{bug}: {name}"


def test_a_model_that_was_built_before_does_not_take_the_replay(build, batch):
    orphan = build("qwen3_moe")
    model = build("qwen3_moe")
    trace = shifted(record(model, *batch))
    with record_routing(model) as recorder, replay_routing(model, trace) as replay, torch.no_grad():
        model(input_ids=batch[0], attention_mask=batch[1])
    assert torch.equal(recorder.trace().experts[trace.valid].long(), trace.experts[trace.valid])
    assert replay.hits == len(find_routers(orphan)) == 2


def test_an_orphan_decoder_is_refused(build, batch):
    """A second decoder that no forward reaches must not pass for a layer that was recorded or replayed."""
    model = build("qwen3_moe")
    trace = record(model, *batch)
    model.orphan = nn.ModuleDict(dict(layers=copy.deepcopy(model.model.layers)))
    with pytest.raises(RoutingError, match=r"never called \['orphan\.layers\.1\.mlp\.gate'"):
        record(model, *batch)
    with pytest.raises(RoutingError, match="the trace is of another model"):
        replay_routing(model, trace)


def test_forward_only_passes_leave_nothing_stale(build, batch):
    model = build("qwen3_moe").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trace = shifted(record(model, *batch))
    with replay_routing(model, trace):
        loss(model, *batch).backward()
    expected = gradients(model)
    model.zero_grad()
    with replay_routing(model, trace):
        with torch.no_grad():
            loss(model, *batch)
        abandoned = loss(model, *batch)  # a forward that no backward follows
        loss(model, *batch).backward()
        with torch.no_grad():
            loss(model, *batch)
        del abandoned
    found = gradients(model)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backwards_in_any_order(build, batch, use_reentrant):
    model = build("qwen3_moe").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    trace = shifted(record(model, *batch))
    found = []
    for order in ((0, 1), (1, 0)):
        model.zero_grad()
        with replay_routing(model, trace) as replay:
            losses = [loss(model, *batch), 2 * loss(model, *batch)]
            for i in order:
                losses[i].backward()
        assert replay.hits == replay.recomputes == 2 * len(trace.layer_ids)
        found.append(gradients(model))
    for name in found[0]:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-6), name


def test_a_block_that_skips_its_router_is_no_recording(build, batch):
    model = build("qwen3_moe")
    block = model.model.layers[2].mlp
    block.forward = lambda hidden: hidden
    with pytest.raises(RoutingError, match=r"never called \['model\.layers\.2\.mlp\.gate'\]"):
        record(model, *batch)


def test_a_second_turn_keeps_the_routes_of_the_first(build, batch):
    model = build("qwen3_moe")
    ids, _ = batch
    with record_routing(model) as recorder, torch.no_grad():
        cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        first = recorder.trace()
        for router in find_routers(model):
            router.module.weight.neg_()  # the policy is updated between the turns
        model(input_ids=ids[:, 6:], past_key_values=cache)
    both = recorder.trace()
    assert torch.equal(both.experts[:, :6], first.experts)
    assert not torch.equal(record(model, ids, torch.ones_like(ids)).experts[:, :6], first.experts)


def test_a_recompute_that_would_flip_keeps_the_experts(build, batch):
    model = build("qwen3_moe").train()
    trace = record(model, *batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    used: list[Tensor] = []
    layer = model.model.layers[2].mlp
    layer.experts.register_forward_pre_hook(lambda module, args: used.append(args[1].clone()))

    def disturb(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        recomputing = torch._C._current_graph_task_id() != -1
        return (-args[0],) if recomputing else args  # far more than rounding would do

    layer.gate.register_forward_pre_hook(disturb)
    with replay_routing(model, trace):
        loss(model, *batch).backward()
    first, again = used
    valid = trace.valid.flatten()
    assert torch.equal(first[valid], trace.experts[:, :, 1].flatten(0, 1)[valid].long())
    assert torch.equal(again[valid], first[valid])


def test_a_reference_that_runs_inside_routes_by_itself(build, batch):
    policy, reference = build("qwen3_moe", seed=0), build("qwen3_moe", seed=1)
    own = record(reference, *batch)
    trace = shifted(record(policy, *batch))
    with torch.no_grad():
        plain = reference(input_ids=batch[0], attention_mask=batch[1]).logits
        with replay_routing(policy, trace), record_routing(reference) as recorder:
            policy(input_ids=batch[0], attention_mask=batch[1])
            inside = reference(input_ids=batch[0], attention_mask=batch[1]).logits
    assert torch.equal(inside, plain)
    assert torch.equal(recorder.trace().experts, own.experts)
