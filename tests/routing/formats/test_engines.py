import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError
from moe_rl.routing.formats import ModelRouting, from_flashinfer, from_sglang, from_tunix, from_vllm

WIDE = ModelRouting(num_hidden_layers=5, moe_layer_ids=(1, 2, 4), num_experts=512, top_k=2)


def test_hand_worked_vllm_payload(lay):
    rows = [[[0, 0], [3, 1], [5, 4], [0, 0], [2, 0]], [[0, 0], [9, 8], [0, 11], [0, 0], [7, 6]]]
    trace = from_vllm(np.array(rows, dtype=np.uint8), lay.model, tokens=3)
    assert trace.experts.tolist() == [
        [[[3, 1], [5, 4], [2, 0]], [[9, 8], [0, 11], [7, 6]], [[0, 0], [0, 0], [0, 0]]]
    ]
    assert trace.valid.tolist() == [[True, True, False]]


def test_rows_from_the_requested_start_go_to_their_positions(lay):
    experts = lay.draw(10)
    trace = from_vllm(lay.all_layers(experts)[4:], lay.model, tokens=11, start=4)
    assert trace.valid.int().tolist() == [[0] * 4 + [1] * 6 + [0]]
    assert np.array_equal(trace.experts[0, 4:10].numpy(), experts[4:])


def test_an_engine_that_ignored_start_is_refused_not_shifted(lay):
    full = lay.all_layers(lay.draw(10))
    with pytest.raises(RoutingError, match="ignored start"):
        from_vllm(full, lay.model, tokens=11, start=4)
    with pytest.raises(
        RoutingError, match="ignored start"
    ):  # 10 rows: 11 tokens from 1 on, or 11 - 1 from 0 on
        from_vllm(full, lay.model, tokens=11, start=1)
    assert from_vllm(full[1:], lay.model, tokens=11, start=1).valid.sum() == 9


def test_uint8_for_512_experts_is_refused_as_wrapped(lay):
    experts = lay.draw(6, model=WIDE)
    with pytest.raises(RoutingError, match="wrapped"):
        from_vllm(experts.astype(np.uint8), WIDE, tokens=7)
    trace = from_vllm(lay.npy(experts.astype(np.uint16)), WIDE, tokens=7)
    assert trace.experts.dtype == torch.int16
    assert np.array_equal(trace.experts[0, :6].numpy(), experts)


def test_a_draft_layer_that_aliases_a_decoder_layer_is_refused(lay):
    with_mtp = np.concatenate([lay.all_layers(lay.draw(6)), lay.draw(6)[:, :1]], axis=1)
    with pytest.raises(RoutingError, match="expected all 5 decoder layers or the 3 MoE layers, got 6"):
        from_vllm(with_mtp, lay.model, tokens=7)


def test_layers_shifted_by_one_are_refused_by_the_dense_layer_they_land_on(lay):
    shifted = np.roll(lay.all_layers(lay.draw(6)), 1, axis=1)
    with pytest.raises(RoutingError, match="a dense layer holds expert ids"):
        from_vllm(shifted, lay.model, tokens=7)


def test_cached_prompt_rows_of_minus_one_are_not_valid(lay):
    experts = lay.draw(8)
    experts[:3] = -1
    split = {
        "prompt_routed_experts": experts[:5].astype(np.int16),
        "routed_experts": experts[5:].astype(np.int16),
    }
    trace = from_vllm(split, lay.model, tokens=9)
    assert trace.valid.int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 0]]
    assert trace.experts[0, :3].sum() == 0


def test_a_row_that_is_minus_one_in_one_layer_is_refused(lay):
    experts = lay.draw(8)
    experts[2, 1] = -1
    with pytest.raises(RoutingError, match="-1 in some places"):
        from_vllm(experts.astype(np.int16), lay.model, tokens=9)


def test_split_halves_of_different_dtypes_are_refused(lay):
    experts = lay.draw(8)
    split = {
        "prompt_routed_experts": experts[:5].astype(np.int16),
        "routed_experts": experts[5:].astype(np.uint8),
    }
    with pytest.raises(RoutingError, match="of one dtype"):
        from_vllm(split, lay.model, tokens=9)


def test_a_response_without_routing_names_the_missing_field(lay):
    with pytest.raises(RoutingError, match="no routed_experts among"):
        from_vllm({"text": "hello"}, lay.model, tokens=4)
    with pytest.raises(RoutingError, match="no routed_experts among"):
        from_sglang({"meta_info": {"id": "a"}}, lay.model, tokens=4)


def test_floats_and_bools_are_no_ids(lay):
    with pytest.raises(RoutingError, match="integers"):
        from_vllm(lay.draw(6).astype(np.float32), lay.model, tokens=7)
    with pytest.raises(RoutingError, match="integers"):
        from_vllm(lay.draw(6).astype(bool), lay.model, tokens=7)
    nested = lay.draw(6).tolist()
    nested[0][0][0] = True
    with pytest.raises(RoutingError, match="integers only"):
        from_vllm(nested, lay.model, tokens=7)


def test_sglang_start_is_read_from_meta_info(lay):
    experts = lay.draw(10)
    meta = {
        "routed_experts": lay.b64(lay.all_layers(experts)[6:].astype("<i4")),
        "routed_experts_start_len": 6,
    }
    trace = from_sglang(meta, lay.model, tokens=11)
    assert trace.valid.int().tolist() == [[0] * 6 + [1] * 4 + [0]]
    with pytest.raises(RoutingError, match="meta_info says start = 6"):
        from_sglang(meta, lay.model, tokens=11, start=2)


def test_a_fused_shared_expert_column_in_flat_ids_is_refused(lay):
    extra = np.concatenate([lay.all_layers(lay.draw(6)), np.full((6, 5, 1), 11)], axis=2).astype("<i4")
    with pytest.raises(RoutingError):
        from_sglang(lay.b64(extra), lay.model, tokens=7)
    # 2 rows of K + 1 = 3 ids are as many as 3 rows of K = 2, a row for each of 3 tokens.
    with pytest.raises(RoutingError, match="does not tell which"):
        from_sglang(lay.b64(extra[:2]), lay.model, tokens=3)


def test_raw_bytes_of_another_width_are_refused(lay):
    with pytest.raises(RoutingError):
        from_sglang(lay.b64(lay.all_layers(lay.draw(6)).astype("<i8")), lay.model, tokens=7)


def partitions(lay, experts, prompt, **schema):
    full = lay.all_layers(experts).astype("<i4")
    described = {
        "dtype": "int32",
        "layout": "row_major",
        "id_space": "logical_global",
        "num_layers": 5,
        "top_k": 2,
        "moe_layer_ids": [1, 2, 4],
        "input_start_position": 0,
        "input_num_rows": prompt - 1,
        "output_start_position": prompt - 1,
        "output_num_rows": len(experts) - prompt + 1,
    }
    return {
        "input_expert_ids": lay.b64(full[: prompt - 1]),
        "output_expert_ids": lay.b64(full[prompt - 1 :]),
        "expert_ids_schema": described | schema,
    }


def test_sglang_partitions_join_at_the_causal_boundary(lay):
    experts = lay.draw(9)
    meta = partitions(lay, experts, prompt=4)
    trace = from_sglang({"meta_info": meta}, lay.model, tokens=10)
    assert np.array_equal(trace.experts[0, :9].numpy(), experts)
    del meta["input_expert_ids"]
    completion = from_sglang({"sglext": meta}, lay.model, tokens=10)
    assert completion.valid.int().tolist() == [[0] * 3 + [1] * 6 + [0]]
    assert np.array_equal(completion.experts[0, 3:9].numpy(), experts[3:])


@pytest.mark.parametrize(
    "schema",
    [{"id_space": "physical"}, {"moe_layer_ids": [0, 2, 4]}, {"top_k": 3}, {"output_start_position": 4}],
)
def test_a_schema_of_another_model_or_id_space_is_refused(lay, schema):
    with pytest.raises(RoutingError):
        from_sglang(partitions(lay, lay.draw(9), prompt=4, **schema), lay.model, tokens=10)


def test_stale_rows_of_a_larger_buffer_are_refused(lay):
    buffers = [torch.from_numpy(lay.draw(16)[:, layer].astype(np.int16)) for layer in range(3)]
    with pytest.raises(RoutingError, match="rows were added"):
        from_flashinfer(buffers, lay.model, tokens=10)
    trace = from_flashinfer([buffer[:9] for buffer in buffers], lay.model, tokens=10)
    assert np.array_equal(trace.experts[0, :9].numpy(), lay.draw(16)[:9])


def test_layers_before_length_is_tunix_order_and_nothing_else(lay):
    experts = lay.draw(7)
    batch = np.full((2, 5, 8, 2), -1)
    batch[0, :, :7] = lay.all_layers(experts).swapaxes(0, 1)
    batch[1, :, :4] = lay.all_layers(experts[:4]).swapaxes(0, 1)
    trace = from_tunix(batch, lay.model, tokens=[8, 5])
    assert trace.valid.int().tolist() == [[1] * 7 + [0], [1] * 4 + [0] * 4]
    assert np.array_equal(trace.experts[0, :7].numpy(), experts)
    with pytest.raises(RoutingError, match="on axis 1"):
        from_tunix(batch.swapaxes(1, 2), lay.model, tokens=[8, 5])


def test_top_1_zeros_in_every_layer_are_refused_but_one_collapsed_layer_is_kept(lay):
    top_1 = ModelRouting(num_hidden_layers=3, moe_layer_ids=(0, 1, 2), num_experts=8, top_k=1)
    experts = lay.draw(6, model=top_1)
    experts[:, 1] = 0
    assert from_vllm(experts, top_1, tokens=7).experts[0, :6, 1].sum() == 0
    with pytest.raises(RoutingError, match="zero in every layer"):
        from_vllm(np.zeros_like(experts), top_1, tokens=7)
