import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError
from moe_rl.routing.formats import (
    ModelRouting,
    from_nemo_rl,
    from_prime_rl,
    from_skyrl,
    from_slime,
    from_verl,
    from_verl_jagged,
)

WIDE = ModelRouting(num_hidden_layers=3, moe_layer_ids=(0, 1, 2), num_experts=512, top_k=2)


def test_jagged_verl_batches_accept_length_and_length_minus_one(lay):
    whole, cut = lay.draw(6, seed=1), lay.draw(4, seed=2)
    nested = torch.nested.nested_tensor(
        [torch.from_numpy(lay.all_layers(rows).astype(np.int16)) for rows in (whole, cut)],
        layout=torch.jagged,
    )
    trace = from_verl_jagged(nested, lay.model, tokens=[6, 5])
    assert trace.valid.int().tolist() == [[1] * 6, [1] * 4 + [0] * 2]
    assert np.array_equal(trace.experts[1, :4].numpy(), cut)


def test_one_trailing_zero_row_is_the_unrouted_token_two_are_lost_rows(lay):
    rows = np.zeros((7, 5, 2), dtype=np.int16)
    rows[:6] = lay.all_layers(lay.draw(6))
    assert from_verl_jagged([rows], lay.model, tokens=[7]).valid.int().tolist() == [[1] * 6 + [0]]
    rows[5] = 0
    with pytest.raises(RoutingError, match="zero in every layer"):
        from_verl_jagged([rows], lay.model, tokens=[7])


def test_a_truncated_response_with_the_routes_of_the_full_one_is_refused(lay):
    batch = np.zeros((1, 10, 5, 2), dtype=np.int16)
    batch[0, :9] = lay.all_layers(lay.draw(9))
    mask = torch.ones(1, 10, dtype=torch.long)
    assert from_verl(batch, lay.model, attention_mask=mask).valid.sum() == 9
    mask[0, 6:] = 0
    with pytest.raises(RoutingError, match="attention_mask is 0"):
        from_verl(batch, lay.model, attention_mask=mask)


def test_slime_samples_and_miles_padding(lay):
    experts = lay.draw(8)
    sample = {"tokens": [0] * 9, "rollout_routed_experts": lay.all_layers(experts).astype(np.int32)}
    assert np.array_equal(from_slime(sample, lay.model, tokens=9).experts[0, :8].numpy(), experts)
    sample["rollout_routed_experts"][6:] = -1
    assert from_slime(sample, lay.model, tokens=9).valid.int().tolist() == [[1] * 6 + [0] * 3]


def test_the_dummy_route_of_nemo_rl_is_never_kept_as_the_last_token(lay):
    experts = lay.draw(8)
    aligned = np.concatenate([experts, np.broadcast_to([0, 1], (1, 3, 2))])
    trace = from_nemo_rl(lay.nrlre1(aligned), lay.model, tokens=9)
    assert trace.valid.int().tolist() == [[1] * 8 + [0]]
    assert np.array_equal(trace.experts[0, :8].numpy(), experts)


def test_nemo_rl_batches_with_dummy_padding_and_missing_rows(lay):
    batch = np.broadcast_to([0, 1], (2, 9, 3, 2)).copy()
    batch[0, :8], batch[1, :5] = lay.draw(8, seed=1), lay.draw(5, seed=2)
    batch[1, 1:3] = -1
    trace = from_nemo_rl(torch.from_numpy(batch), lay.model, tokens=[9, 6])
    assert trace.valid.int().tolist() == [[1] * 8 + [0], [1, 0, 0, 1, 1, 0, 0, 0, 0]]
    with pytest.raises(RoutingError, match="after the end of its 5 tokens"):
        from_nemo_rl(torch.from_numpy(batch), lay.model, tokens=[5, 6])


def test_int8_ids_of_more_than_128_experts_are_refused(lay):
    many = ModelRouting(num_hidden_layers=3, moe_layer_ids=(0, 1, 2), num_experts=200, top_k=2)
    experts = lay.draw(6, model=many)
    with pytest.raises(RoutingError, match="int8 cannot hold"):
        from_nemo_rl(lay.nrlre1(experts, "int8"), many, tokens=7)
    assert np.array_equal(
        from_nemo_rl(lay.nrlre1(experts, "int16"), many, tokens=7).experts[0, :6].numpy(), experts
    )


@pytest.mark.parametrize(
    "text",
    ["nrlre2:int8:6x3x2:", "nrlre1:float32:6x3x2:", "nrlre1:int8:6x-3x2:", "nrlre1:int8:6x3:", "nrlre1:int8"],
)
def test_envelopes_of_another_version_dtype_or_shape_are_refused(lay, text):
    with pytest.raises(RoutingError):
        from_nemo_rl(text + lay.b64(lay.draw(6).astype(np.int8)), lay.model, tokens=7)


def wire(lay, experts, dtype, **more):
    return {"data": lay.b64(experts.astype(dtype)), "shape": list(experts.shape), "dtype": dtype, **more}


def test_prime_rl_without_a_dtype_is_uint8_and_refused_for_512_experts(lay):
    experts = lay.draw(6, model=WIDE)
    assert experts.max() > 255
    payload = wire(lay, experts, "uint16", start=0)
    assert np.array_equal(from_prime_rl(payload, WIDE, tokens=7).experts[0, :6].numpy(), experts)
    payload = wire(lay, experts % 256, "uint8", start=0)
    del payload["dtype"]
    with pytest.raises(RoutingError, match="uint8 cannot hold"):
        from_prime_rl(payload, WIDE, tokens=7)


def test_dtypes_that_follow_the_ids_may_differ_between_sequences(lay):
    wide, narrow = lay.draw(6, model=WIDE), lay.draw(6) * 20
    for importer, dtype in ((from_prime_rl, "uint16"), (from_skyrl, "int16")):
        trace = importer([wire(lay, wide, dtype), wire(lay, narrow, "uint8")], WIDE, tokens=[7, 7])
        assert np.array_equal(trace.experts[:, :6].numpy(), [wide, narrow])


def test_prime_rl_turns_start_where_they_say_and_samples_lose_their_zero_row(lay):
    experts = lay.draw(9)
    turn = from_prime_rl(wire(lay, experts[5:], "uint8", start=5), lay.model, tokens=10)
    assert turn.valid.int().tolist() == [[0] * 5 + [1] * 4 + [0]]
    padded = np.concatenate([experts, np.zeros((1, 3, 2), dtype=experts.dtype)]).astype(np.uint8)
    sample = {"data": padded.tobytes(), "shape": [10, 3, 2], "dtype": "uint8"}
    assert from_prime_rl(sample, lay.model, tokens=10).valid.int().tolist() == [[1] * 9 + [0]]


def test_bytes_that_do_not_fill_the_shape_are_refused(lay):
    payload = wire(lay, lay.draw(6), "uint8")
    payload["shape"] = [7, 3, 2]
    with pytest.raises(RoutingError, match="needs 42 bytes, got 36"):
        from_skyrl(payload, lay.model, tokens=7)
