import pytest
import torch

from moe_rl.objectives import aggregate

VALUES = torch.tensor([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0], [100.0, 100.0, 100.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("token-mean", {}, 9 / 3),
        ("token-mean", {"tokens": 10}, 9 / 10),
        ("seq-mean-token-mean", {}, (2 + 5 + 0) / 3),
        ("seq-mean-token-mean", {"sequences": 8}, 7 / 8),
        ("seq-mean-token-sum", {}, (4 + 5) / 3),
        ("seq-mean-token-sum-norm", {"length_divisor": 4.0}, 9 / 4 / 3),
        ("seq-mean-token-sum-norm", {"length_divisor": 4.0, "sequences": 6}, 9 / 4 / 6),
    ],
)
def test_by_hand(mode, options, expected):
    assert aggregate(VALUES, MASK, mode, **options).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_nothing_but_padding_is_zero(mode):
    assert aggregate(VALUES / 0, MASK & False, mode).item() == 0


def test_a_divisor_without_use_is_refused():
    with pytest.raises(ValueError, match="has no use under aggregation 'token-mean'"):
        aggregate(VALUES, MASK, "token-mean", length_divisor=4.0)
