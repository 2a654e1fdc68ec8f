import math

import pytest
import torch

from moe_rl.objectives import MismatchCorrection, get_mismatch_correction, get_objective, group_advantages


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"clip_low": "0.2"}, "clip_low must be a number, got '0.2'"),
        ("grpo", {"clip_high": None}, "clip_high must be a number, got None"),
        ("grpo", {"dual_clip": "3"}, "dual_clip must be a number, got '3'"),
        ("grpo", {"kl_coef": True}, "kl_coef must be a number, got True"),
        ("gspo", {"aggregation": None}, "aggregation must be a string, got None"),
        ("dr_grpo", {"length_divisor": "100"}, "length_divisor must be a number, got '100'"),
        ("contrastive", {"group_size": 2.0}, "group_size must be an integer, got 2.0"),
    ],
)
def test_an_option_of_another_type_is_named(name, options, message):
    with pytest.raises(TypeError, match=message):
        get_objective(name, **options)


def test_whole_numbers_and_none_pass_where_they_are_meant():
    assert get_objective("grpo", clip_low=1, dual_clip=None).clip_low == 1


def test_an_option_of_a_correction_is_named():
    with pytest.raises(TypeError, match="high must be a number, got '2'"):
        get_mismatch_correction("token_tis", high="2")
    with pytest.raises(TypeError, match="level must be a string, got None"):
        MismatchCorrection(level=None)


@pytest.mark.parametrize(
    ("group_size", "error", "message"),
    [
        (-2, ValueError, "group_size must be 1 or more, got -2"),
        (0, ValueError, "group_size must be 1 or more, got 0"),
        ("2", TypeError, "group_size must be an integer, got '2'"),
        (2.0, TypeError, "group_size must be an integer, got 2.0"),
    ],
)
def test_a_group_size(group_size, error, message):
    with pytest.raises(error, match=message):
        group_advantages(torch.zeros(4), group_size)


@pytest.mark.parametrize("option", ["tau_pos", "tau_neg"])
def test_sapo_divides_by_its_temperatures(option):
    with pytest.raises(ValueError, match="tau_pos and tau_neg divide and must be > 0"):
        get_objective("sapo", **{option: 0.0})


@pytest.mark.parametrize("count", ["sequences", "tokens"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_count_that_is_no_count(count, value):
    batch = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    with pytest.raises(ValueError, match=f"{count} counts the whole mini-batch"):
        get_objective("grpo")(*batch, **{count: value})
