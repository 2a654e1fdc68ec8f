import math

import pandas as pd
import pytest

from moe_rl.analysis.collapse import Collapse, detect_collapse


def test_first_hit_is_the_step_that_completes_the_bad_steps() -> None:
    # window 2: trailing means from step 2 on are 1, 1, .5, 0, 0, 0; bad (< .5 of 1) from step 5 on
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert detect_collapse(rewards, window=2, fraction=0.5, patience=1) == Collapse(5, None, "reward")
    assert detect_collapse(rewards, window=2, fraction=0.5, patience=3) == Collapse(7, None, "reward")
    assert detect_collapse(rewards, window=2, fraction=0.5, patience=4) == Collapse(None, 7, "none")


def test_defaults_by_hand() -> None:
    # trailing means over 5: 0.8 at step 10; .64 .48 .32 .16 0 0 0 at steps 11..17; below .4 from step 13 on,
    # the fifth bad step in a row is step 17
    rewards = [0.8] * 10 + [0.0] * 7
    assert detect_collapse(rewards).step == 17
    assert detect_collapse(rewards[:16]) == Collapse(None, 16, "none")


def test_columns_of_a_frame_are_series_too() -> None:
    rewards = pd.Series([0.8] * 10 + [0.0] * 7, index=range(1, 18))
    assert detect_collapse(rewards, rewards, rewards).step == 17
    assert detect_collapse(pd.Series([0.0, 0.0])).reason == "never earned reward"


def test_bad_steps_must_be_consecutive() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert detect_collapse(rewards, window=1, fraction=0.5, patience=3).step is None
    assert detect_collapse(rewards, window=1, fraction=0.5, patience=2).step == 3


def test_exactly_the_fraction_is_not_bad() -> None:
    assert detect_collapse([1.0] + [0.5] * 5, window=1, fraction=0.5, patience=1).step is None


def test_the_best_so_far_counts_not_the_best_to_come() -> None:
    assert detect_collapse([0.1, 0.1, 0.1, 1.0, 1.0], window=1, fraction=0.5, patience=1).step is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_a_collapse_at_its_step(bad: float) -> None:
    good = [0.5] * 4
    assert detect_collapse([0.5, bad, 0.5, 0.5], good, good) == Collapse(2, None, "non-finite reward")
    assert detect_collapse(good, [0.1, 0.1, bad, 0.1], good) == Collapse(3, None, "non-finite loss")
    assert detect_collapse(good, good, [bad, 1, 1, 1]) == Collapse(1, None, "non-finite gradient norm")


def test_a_run_that_never_earned_reward_has_not_collapsed() -> None:
    outcome = detect_collapse([0.0] * 40)
    assert outcome == Collapse(None, 40, "never earned reward")
    assert str(outcome) == "none by step 40, never earned reward"
    assert str(detect_collapse([0.5] * 40)) == "none by step 40"
    assert str(detect_collapse([1.0] + [0.0] * 9, window=1)) == "step 6 (reward)"


def test_the_prefix_up_to_the_hit_gives_the_same_answer() -> None:
    """What the training loop saw when it stopped agrees with what the report says afterwards."""
    rewards = [0.4, 0.6, 0.9, 0.8, 0.9, 0.9, 0.3, 0.2, 0.1, 0.1, 0.0, 0.1, 0.0, 0.2, 0.9, 0.9]
    whole = detect_collapse(rewards, window=3, patience=4)
    hits = [detect_collapse(rewards[:n], window=3, patience=4).step for n in range(len(rewards) + 1)]
    assert whole.step == 12
    assert hits == [None] * 12 + [12] * 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_where_updates_were_skipped_the_run_was_told_to_go_on(bad: float) -> None:
    good, skipped = [0.5] * 4, [0, 1, 0, 0]
    assert detect_collapse(good, [0.1, bad, 0.1, 0.1], good, skipped).step is None
    assert detect_collapse(good, [0.1, bad, bad, 0.1], good, skipped).step == 3
    # an infinite reward would be the best trailing mean for ever, and every later step bad
    rewards = [0.5, bad, 0.5, 0.5]
    assert detect_collapse(rewards, good, good, skipped, window=2, patience=1) == Collapse(None, 4, "none")
