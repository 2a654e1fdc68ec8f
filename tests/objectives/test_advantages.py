import math

import pytest
import torch

from moe_rl.objectives import NORMALISATIONS, equal_rewards, get_objective, group_advantages, turn_advantages

F64 = torch.float64
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 4.0, 4.0]], dtype=F64)  # means 1, 3


@pytest.mark.parametrize(
    ("normalise", "divisors"),
    [
        ("paper", (math.sqrt(2), math.sqrt(4 / 3))),
        ("population", (math.sqrt(1.5), 1.0)),
        ("trl", (math.sqrt(2) + 1e-4, math.sqrt(4 / 3) + 1e-4)),
        ("verl", (math.sqrt(2) + 1e-6, math.sqrt(4 / 3) + 1e-6)),
        ("mean", (1.0, 1.0)),
    ],
)
def test_by_hand(normalise, divisors):
    centred = torch.tensor([[0.0, -1, -1, 2], [-1, -1, 1, 1]], dtype=F64)
    expected = centred / torch.tensor(divisors, dtype=F64)[:, None]
    torch.testing.assert_close(group_advantages(REWARDS, normalise=normalise), expected, rtol=0, atol=1e-15)


def test_leave_one_out_by_hand():
    expected = torch.tensor([[0, -4 / 3, -4 / 3, 8 / 3], [-4 / 3, -4 / 3, 4 / 3, 4 / 3]], dtype=F64)
    torch.testing.assert_close(
        group_advantages(REWARDS, normalise="leave-one-out"), expected, rtol=0, atol=1e-15
    )


def test_flat_rewards_keep_their_shape():
    flat = group_advantages(REWARDS.flatten(), 4)
    assert torch.equal(flat, group_advantages(REWARDS).flatten())


@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_equal_rewards_and_groups_of_one_are_exactly_zero(normalise):
    # The float32 mean of three times 0.1 is not 0.1, so a naive (r - mean) / std would not be 0.
    equal = torch.full((2, 3), 0.1)
    assert group_advantages(equal, normalise=normalise).tolist() == [[0.0] * 3] * 2
    assert group_advantages(torch.tensor([5.0, -1.0]), 1, normalise=normalise).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_rewards_equal_up_to_rounding_are_exactly_zero(normalise):
    # 0.1 + 0.2 is one unit of rounding above 0.3: over their standard deviation that would be 1.15.
    rounded = torch.tensor([[0.3, 0.1 + 0.2, 0.3], [0.3, 0.3, 0.4]], dtype=F64)
    advantages = group_advantages(rounded, normalise=normalise)
    assert advantages[0].tolist() == [0.0] * 3
    assert (advantages[1] != 0).all()
    assert equal_rewards(rounded).tolist() == [True, False]


def test_where_rounding_ends():
    eps = torch.finfo(torch.float32).eps
    rewards = torch.tensor([[1.0, 1 - 8 * eps], [1.0, 1 - 8.5 * eps], [0.0, 1e-30], [-1.0, 1.0]])
    assert equal_rewards(rewards).tolist() == [True, False, False, False]
    assert equal_rewards(torch.tensor([[0, 0], [0, 1]])).tolist() == [True, False]
    # bfloat16 resolves 1 / 256 below 1, far above float32's eps: another number is another reward.
    assert equal_rewards(torch.tensor([[1.0, 0.95]], dtype=torch.bfloat16)).tolist() == [False]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("share", [0.9, 1e-8])
def test_tiny_and_huge_rewards(dtype, share):
    for unit in (share * torch.finfo(dtype).max, torch.finfo(dtype).tiny / share):
        advantages = group_advantages(torch.tensor([[0.0, 0, 1, 1]], dtype=dtype) * unit)
        expected = math.sqrt(0.75) * torch.tensor([[-1.0, -1, 1, 1]], dtype=dtype)
        torch.testing.assert_close(advantages, expected)


def test_invariant_to_affine_rewards():
    torch.testing.assert_close(
        group_advantages(3 * REWARDS - 7), group_advantages(REWARDS), rtol=0, atol=1e-12
    )


def test_integer_rewards_become_float32():
    assert group_advantages(torch.tensor([[0, 1]])).dtype == torch.float32


def test_errors():
    with pytest.raises(ValueError, match="unknown normalise 'std'; known: paper"):
        group_advantages(REWARDS, normalise="std")
    with pytest.raises(ValueError, match=r"\[P \* G\] with group_size"):
        group_advantages(torch.zeros(7), 4)
    with pytest.raises(ValueError, match="group_size is 8"):
        group_advantages(REWARDS, 8)
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([[0.0, float("nan")]]))


# Two responses to one prompt: turn 0 is rewarded 1 and 3, turn 1 is rewarded 5 and 1.
TURN_REWARDS = torch.tensor([[[1.0, 5.0], [3.0, 1.0]]], dtype=F64)
TURN_IDS = torch.tensor([[-1, 0, 0, 1, -1], [0, -1, 1, 1, 1]])


def test_turn_advantages_by_hand():
    mean = turn_advantages(TURN_REWARDS, TURN_IDS, normalise="mean")
    assert mean.tolist() == [[0, -1, -1, 2, 0], [1, 0, -2, -2, -2]]
    paper = turn_advantages(TURN_REWARDS[0], TURN_IDS, 2)
    half = 1 / math.sqrt(2)  # (1 - 2) / sqrt(2) and (5 - 3) / sqrt(8), ddof 1
    expected = torch.tensor([[0, -half, -half, half, 0], [half, 0, -half, -half, -half]], dtype=F64)
    torch.testing.assert_close(paper, expected, rtol=0, atol=1e-15)


def test_a_turn_is_compared_among_the_responses_that_have_it():
    rewards = torch.tensor([[[1.0, 4.0], [2.0, math.nan], [6.0, 2.0]], [[0.0, 9.0], [0.0, 5.0], [3.0, 7.0]]])
    turn_ids = torch.tensor([[0, 1], [0, -1], [0, 1], [0, -1], [0, 1], [0, -1]])
    mean = turn_advantages(rewards, turn_ids, normalise="mean")
    assert mean.tolist() == [[-2, 1], [-1, 0], [3, -1], [-1, 0], [-1, 0], [2, 0]]
    others = turn_advantages(rewards, turn_ids, normalise="leave-one-out")
    assert others[[0, 2], 1].tolist() == [2, -2]  # 4 - 2 and 2 - 4: two responses have turn 1


@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_one_turn_is_a_group_advantage(normalise):
    turn_ids = torch.tensor([[0, 0, -1]]).expand(8, 3)
    by_turn = turn_advantages(REWARDS[:, :, None], turn_ids, normalise=normalise)
    expected = group_advantages(REWARDS, normalise=normalise).flatten()
    assert torch.equal(by_turn[:, 0], expected)
    assert torch.equal(by_turn[:, 1], expected)
    assert (by_turn[:, 2] == 0).all()


def test_gspo_token_weighs_each_token_by_its_turn():
    """Eq. 13, 14 and 17: the gradient of log pi at token t of response i is s_i A_it / (B |y_i|)."""
    ratios = torch.tensor([[1.0, 1.1, 0.9, 1.2, 1.0], [0.95, 1.0, 1.0, 1.05, 1.1]], dtype=F64)
    logp = ratios.log().requires_grad_()
    advantages = turn_advantages(TURN_REWARDS, TURN_IDS, normalise="mean")
    mask = TURN_IDS >= 0
    objective = get_objective("gspo_token", clip_low=0.5, clip_high=0.5)
    loss, _ = objective(logp, torch.zeros_like(ratios), advantages, mask)
    loss.backward()
    s_0, s_1 = (1.1 * 0.9 * 1.2) ** (1 / 3), (0.95 * 1.0 * 1.05 * 1.1) ** (1 / 4)
    assert loss.item() == pytest.approx(-(s_0 * (-1 - 1 + 2) / 3 + s_1 * (1 - 2 - 2 - 2) / 4) / 2, abs=1e-12)
    rows = [[0, s_0 / 6, s_0 / 6, -2 * s_0 / 6, 0], [-s_1 / 8, 0, 2 * s_1 / 8, 2 * s_1 / 8, 2 * s_1 / 8]]
    torch.testing.assert_close(logp.grad, torch.tensor(rows, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "turn_ids", "error", "message"),
    [
        (TURN_REWARDS, TURN_IDS.float(), TypeError, "turn_ids_BT must hold integers"),
        (TURN_REWARDS, TURN_IDS[:1], ValueError, "for the 2 responses of the rewards"),
        (TURN_REWARDS, TURN_IDS + 1, ValueError, "must lie in -1 .* to 1"),
        (TURN_REWARDS[0], TURN_IDS, ValueError, r"\[P \* G, N\] with group_size"),
        (TURN_REWARDS * math.nan, TURN_IDS, ValueError, "turns with tokens must be finite"),
    ],
)
def test_errors_of_turns(rewards, turn_ids, error, message):
    with pytest.raises(error, match=message):
        turn_advantages(rewards, turn_ids)
