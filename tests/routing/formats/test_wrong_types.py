"""Arguments of a wrong type get one RoutingError, whichever importer they are given to."""

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError, formats

SCALARS = [np.zeros(()), np.zeros((), np.int64), torch.zeros((), dtype=torch.int32)]
UNREADABLE = [
    torch.zeros(9, 5, 2, dtype=torch.int16, device="meta"),
    torch.quantize_per_tensor(torch.zeros(9, 5, 2), 1.0, 0, torch.qint8),
    torch.nested.nested_tensor([torch.zeros(9, 5, 2)]),
]
BY_SEQUENCE = sorted(set(formats.__all__) - {"ModelRouting", "align_to_mask", "from_miles_dump", "from_verl"})


@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_values_that_are_no_payloads(lay, name):
    for value in (*SCALARS, *UNREADABLE, [UNREADABLE[0]], [UNREADABLE[1]], "\ud800"):
        for tokens in (10, [10]):
            with pytest.raises(RoutingError):
                getattr(formats, name)(value, lay.model, tokens=tokens)


@pytest.mark.parametrize("name", ["from_vllm", "from_megatron"])
def test_counts_of_tokens(lay, name):
    rows = lay.draw(9)
    value = lay.all_layers(rows) if name == "from_vllm" else [rows[:, at] for at in range(3)]
    read = getattr(formats, name)
    for tokens in (None, 1.5, True, "10", "5", {}, [None], [[10]], [1.0], torch.tensor(10.0), 0, -1):
        with pytest.raises(RoutingError):
            read(value, lay.model, tokens=tokens)
    expected = read(value, lay.model, tokens=10)
    for tokens in (torch.tensor(10), np.int64(10), np.array(10)):
        assert torch.equal(read(value, lay.model, tokens=tokens).experts, expected.experts)


def test_starts(lay):
    value = lay.all_layers(lay.draw(9))
    for start in (None, 1.0, True, "0", [None], -1, [0, 0]):
        with pytest.raises(RoutingError):
            formats.from_vllm(value, lay.model, tokens=10, start=start)


@pytest.mark.parametrize(
    "mask", [None, np.ones((1, 9)), [[1] * 9], torch.ones(9), torch.ones(1, 9, device="meta")]
)
def test_masks_of_verl_batches(lay, mask):
    value = lay.all_layers(lay.draw(9))[None]
    with pytest.raises(RoutingError):
        formats.from_verl(value, lay.model, attention_mask=mask)
