"""Every format, written as its source lays it out, gives back the ids that went in."""

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError, formats

R = 12  # rows


def test_every_importer_has_a_source_here(lay):
    tested = {"from_vllm", "from_sglang", "from_megatron", "from_megatron_inference", "from_router_tracer"}
    tested |= {
        "from_verl_jagged",
        "from_slime",
        "from_nemo_rl",
        "from_skyrl",
        "from_prime_rl",
        "from_flashinfer",
    }
    tested |= {"from_tunix"}
    elsewhere = {"from_verl", "from_miles_dump"}  # a padded batch and a file
    assert tested | elsewhere == {name for name in formats.__all__ if name.startswith("from_")}


def test_all_but_the_last_token(lay, source):
    experts = lay.draw(R)
    trace = source.read(source.write(experts), R + 1)
    assert trace.layer_ids == (1, 2, 4)
    assert trace.num_experts == 12
    assert trace.valid.tolist() == [[True] * R + [False]]
    assert trace.experts.shape == (1, R + 1, 3, 2)
    assert np.array_equal(trace.experts[0, :R].numpy(), experts)


def test_every_token(lay, source):
    experts = lay.draw(R)
    trace = source.read(source.write(experts), R)
    assert trace.valid.tolist() == [[True] * R]
    assert np.array_equal(trace.experts[0].numpy(), experts)


def test_lost_rows_are_refused_not_shifted(lay, source):
    with pytest.raises(RoutingError):
        source.read(source.write(lay.draw(R)), R + 2)


def test_extra_rows_are_refused_not_cut(lay, source):
    with pytest.raises(RoutingError):
        source.read(source.write(lay.draw(R)), R - 1)


def test_zeros_of_a_capture_that_never_ran_are_refused(lay, source):
    with pytest.raises(RoutingError):
        source.read(source.write(np.zeros((R, 3, 2), dtype=np.int64)), R + 1)


def test_zeros_in_one_layer_are_refused(lay, source):
    experts = lay.draw(R)
    experts[:, 1] = 0
    with pytest.raises(RoutingError):
        source.read(source.write(experts), R + 1)


def test_zero_rows_at_the_start_are_refused(lay, source):
    experts = lay.draw(R)
    experts[:3] = 0
    with pytest.raises(RoutingError, match="zero in every layer"):
        source.read(source.write(experts), R + 1)


def test_an_expert_chosen_twice_is_refused(lay, source):
    experts = lay.draw(R)
    experts[5, 1] = 7
    with pytest.raises(RoutingError, match="twice"):
        source.read(source.write(experts), R + 1)


def test_physical_ids_are_refused(lay, source):
    experts = lay.draw(R)
    experts[5, 1, 0] = 12  # a copy of a popular expert
    with pytest.raises(RoutingError, match=r"\[0, 12\), layer 2"):
        source.read(source.write(experts), R + 1)


def test_another_k_is_refused(lay, source):
    experts = np.concatenate([lay.draw(R), np.full((R, 3, 1), 11)], axis=2)  # a fused shared expert
    with pytest.raises(RoutingError):
        source.read(source.write(experts), R + 1)


def test_padded_batches_of_verl_keep_their_layout(lay):
    lengths, starts, T = [7, 4], [2, 5], 11
    mask = torch.zeros(2, T, dtype=torch.bool)
    batch = np.zeros((2, T, 5, 2), dtype=np.int16)
    for b, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mask[b, start : start + length] = True
        batch[b, start : start + length - 1] = lay.all_layers(lay.draw(length - 1, seed=b))
    trace = formats.from_verl(batch, lay.model, attention_mask=mask)
    assert trace.valid[0].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7]
    assert trace.valid[1].nonzero().flatten().tolist() == [5, 6, 7]
    assert np.array_equal(trace.experts[1, 5:8].numpy(), lay.draw(3, seed=1))


def test_routing_on_padding_is_refused_as_shifted(lay):
    batch = np.zeros((1, 8, 5, 2), dtype=np.int16)
    batch[0, 1:6] = lay.all_layers(lay.draw(5))
    mask = torch.tensor([[False, False, True, True, True, True, True, True]])
    with pytest.raises(RoutingError, match="attention_mask is 0"):
        formats.from_verl(batch, lay.model, attention_mask=mask)


def test_batches_are_padded_on_the_right(lay):
    values = [lay.draw(6, seed=0), lay.draw(3, seed=1), None]
    trace = formats.from_vllm(values, lay.model, tokens=[7, 3, 5])
    assert trace.valid.int().tolist() == [[1] * 6 + [0], [1] * 3 + [0] * 4, [0] * 7]
    assert np.array_equal(trace.experts[1, :3].numpy(), values[1])


def test_mixed_dtypes_in_a_batch_are_refused(lay):
    values = [lay.draw(6).astype(np.uint8), lay.draw(6).astype(np.int32)]
    with pytest.raises(RoutingError, match=r"mix the dtypes \['int32', 'uint8'\]"):
        formats.from_vllm(values, lay.model, tokens=[7, 7])


def test_a_batch_of_aborted_requests_is_refused(lay):
    with pytest.raises(RoutingError, match="no sequence holds routing"):
        formats.from_vllm([None, None], lay.model, tokens=[4, 4])


def test_traces_move_onto_a_left_padded_batch(lay):
    trace = formats.from_vllm([lay.draw(4), lay.draw(2)], lay.model, tokens=[5, 3])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    moved = formats.align_to_mask(trace, mask)
    assert moved.valid.int().tolist() == [[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]]
    assert torch.equal(moved.experts[0, 1:5], trace.experts[0, :4])
    assert torch.equal(moved.experts[1, 3:5], trace.experts[1, :2])
    with pytest.raises(RoutingError, match="more than the 1 tokens"):
        formats.align_to_mask(trace, torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]))
