"""Every path of the noise floor routes the same tokens; where nothing rounds otherwise, nothing changes."""

from dataclasses import fields
from itertools import islice

import pytest
import torch

from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.floor import PATHS, cached_decode, noise_floor, regrouped, widened
from moe_rl.laboratory.observe import observe
from moe_rl.models import set_experts
from moe_rl.training.passes import split

EXACT = ("repeated", "batch_half", "batch_one", "padding", "decode")


@pytest.fixture
def paths(build, batch):
    """The first paths of the floor of a tiny model in some dtype, by name."""

    def paths(names, dtype=torch.float32, family="qwen3_moe"):
        model = build(family).to(dtype=dtype)
        if dtype == torch.float64:
            set_experts(model, "eager")  # grouped kernels have no float64
        plan = split(len(batch), 2, None)
        reference = observe(model, batch, plan, 1.0)
        return {
            path.name: path for path in islice(noise_floor(model, batch, plan, 1.0, reference), len(names))
        }

    return paths


def changed(path, batch, metric="experts"):
    return measure_change(path.reference, path.other, batch.routing_rows_BT).value(metric)


def test_a_repeated_forward_is_bitwise_the_same(paths, batch):
    repeated = paths(EXACT[:1])["repeated"]
    for field in fields(repeated.reference):
        before, after = (getattr(one, field.name) for one in (repeated.reference, repeated.other))
        if field.name != "trace":
            assert torch.equal(before, after), field.name
    table = measure_change(repeated.reference, repeated.other, batch.attention_mask_BT)
    assert {metric: table.value(metric) for metric in table.metrics} == {
        "experts": 0, "sets": 0, "tokens": 0, "top1": 0, "gate_mass": 0, "router_shift": 1,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_in_float64_no_path_changes_an_expert(paths, batch, family):
    """All paths route and score the same rows: in float64 their rounding is far below any margin here."""
    found = paths(EXACT, torch.float64, family)
    assert tuple(found) == EXACT
    for name in EXACT:
        path = found[name]
        on = path.reference.trace.valid & batch.routing_rows_BT
        assert torch.equal(path.other.trace.experts[on], path.reference.trace.experts[on]), name
        assert changed(path, batch) == 0, name
        torch.testing.assert_close(
            path.other.scores_BTLE[on].double(), path.reference.scores_BTLE[on].double(), rtol=0, atol=1e-6
        )
        difference = (path.other.logp_BT - path.reference.logp_BT)[batch.response_mask_BT > 0]
        assert difference.abs().max() < 1e-5, name


def test_bfloat16_paths_differ_from_the_reference(paths, batch):
    found = paths(PATHS)
    assert list(found) == list(PATHS)
    for name in ("bfloat16_autocast", "bfloat16_weights"):
        assert not torch.equal(found[name].other.logp_BT, found[name].reference.logp_BT), name
        assert changed(found[name], batch, "gate_mass") > 0, name
    decode = found["bfloat16_decode"]
    assert torch.equal(decode.reference.logp_BT, found["bfloat16_weights"].other.logp_BT)


def test_a_decode_of_other_weights_is_seen(build, batch):
    """The floor compares what it should: a decode by other weights changes experts."""
    model, plan = build(), split(len(batch), 2, None)
    reference = observe(model, batch, plan, 1.0)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.neg_()
    other = cached_decode(model, batch, plan, 1.0)
    assert measure_change(reference, other, batch.routing_rows_BT).value("experts") > 0.2


def test_regrouped_keeps_the_rows_of_every_mini_batch():
    plan = [[slice(0, 3)], [slice(3, 5), slice(5, 6)]]
    assert regrouped(plan, lambda n: 1) == [
        [slice(0, 1), slice(1, 2), slice(2, 3)],
        [slice(3, 4), slice(4, 5), slice(5, 6)],
    ]
    assert regrouped(plan, lambda n: -(-n // 2)) == [
        [slice(0, 2), slice(2, 3)],
        [slice(3, 4), slice(4, 5), slice(5, 6)],
    ]


def test_widened_moves_every_token_and_nothing_else(batch):
    wide = widened(batch, 3)
    assert wide.prompt_length == batch.prompt_length + 3
    for name in ("input_ids_BT", "attention_mask_BT", "response_mask_BT", "routing_rows_BT"):
        whole = getattr(wide, name)
        assert torch.equal(whole[:, 3:-3], getattr(batch, name)), name
        assert not whole[:, :3].any() and not whole[:, -3:].any(), name
