import math
from collections.abc import Callable

import pytest

from moe_rl.analysis.comparison import compare
from moe_rl.analysis.tables import arm_table, difference_table, run_table, three_digits
from moe_rl.store import Run


def test_run_row_by_hand(make_run: Callable[..., Run]) -> None:
    # 20 steps: the last 10 % are steps 19 and 20
    rewards = (*[0.5] * 18, 0.6, 0.8)
    (comparison,) = compare([make_run("a", rewards=rewards, clip=0.004)])
    row = run_table(comparison).iloc[0]
    assert (row["arm"], row["seed"], row["status"], row["steps"], row["steps_planned"]) == (
        "grpo",
        0,
        "done",
        20,
        20,
    )
    assert row["final_reward"] == pytest.approx(0.7)
    assert (row["start_greedy"], row["start_sampled"]) == (0.25, 0.2)
    assert (row["final_greedy"], row["final_sampled"], row["last_evaluation"]) == (0.75, 0.7, 20)
    assert row["clip_token"] == pytest.approx(0.002)  # 0.004 on odd steps, 0 on even ones
    assert (row["drift_first"], row["drift_old"]) == (pytest.approx(0.01), pytest.approx(0.02))
    assert row["drift_first_layer"] == pytest.approx(0.01)
    assert row["drift_last_layer"] == pytest.approx(0.01 + 0.002 * 10.5)
    assert row["seconds_per_step"] == 1.5
    assert math.isnan(row["collapse_step"] or math.nan) and row["censored_at"] == 20


def test_a_run_without_evaluations_or_steps_has_gaps_not_numbers(make_run: Callable[..., Run]) -> None:
    (comparison,) = compare([make_run("a", rewards=(), evals=((0, 0.25, 0.2),), finish=False)])
    row = run_table(comparison).iloc[0]
    assert row["start_greedy"] == 0.25
    assert (
        math.isnan(row["final_greedy"]) and math.isnan(row["final_reward"]) and math.isnan(row["drift_old"])
    )
    assert (row["status"], row["steps"], row["collapse"]) == ("unfinished", 0, "none by step 0")


def test_arm_rows_summarise_seeds_and_compare_clip_fractions(make_run: Callable[..., Run]) -> None:
    runs = [make_run(f"grpo{s}", seed=s, rewards=(r,) * 20, clip=0.002) for s, r in enumerate((0.2, 0.4))]
    runs += [make_run(f"gspo{s}", arm="gspo", seed=s, rewards=(0.9,) * 20, clip=0.3) for s in (0, 1)]
    (comparison,) = compare(runs)
    grpo, gspo = (row for _, row in arm_table(run_table(comparison)).iterrows())
    assert (grpo["arm"], grpo["seeds"], grpo["short"]) == ("grpo", 2, 0)
    assert grpo["final_reward"] == pytest.approx(0.3)
    assert (grpo["final_reward_low"], grpo["final_reward_high"]) == (pytest.approx(0.2), pytest.approx(0.4))
    assert grpo["interval"] == "min–max of the seeds"
    assert (grpo["clip_ratio"], gspo["clip_ratio"]) == (pytest.approx(1), pytest.approx(150))
    assert gspo["collapse"] == "none by step 20"


def test_clip_ratio_needs_a_grpo_arm_that_clips(make_run: Callable[..., Run]) -> None:
    (alone,) = compare([make_run("gspo", arm="gspo")])
    assert math.isnan(arm_table(run_table(alone))["clip_ratio"].iloc[0])
    (unclipped,) = compare([make_run("grpo", clip=0.0), make_run("gspo2", arm="gspo")])
    assert arm_table(run_table(unclipped))["clip_ratio"].isna().all()


def test_collapses_of_an_arm_are_named_by_seed(make_run: Callable[..., Run]) -> None:
    runs = [
        make_run("a", seed=0, rewards=(1.0, 1.0, 0.0, 0.0, 0.0)),
        make_run("b", seed=1, rewards=(1.0,) * 20),
        make_run("c", seed=2, rewards=(0.0,) * 15, finish=False),
    ]
    (comparison,) = compare(runs)
    (row,) = arm_table(run_table(comparison)).to_dict("records")
    assert row["short"] == 2  # "a" is done, and stopped at step 5 of 20
    assert row["collapse"] == (
        "1 of 3: seed 0 at step 5 (reward); the others none by step 15 and 20; 1 never earned reward"
    )


def test_differences_are_paired_by_seed(make_run: Callable[..., Run]) -> None:
    runs = [make_run(f"grpo{s}", seed=s, rewards=(r,) * 20) for s, r in enumerate((0.2, 0.6, 0.9))]
    runs += [make_run(f"gspo{s}", arm="gspo", seed=s, rewards=(r,) * 20) for s, r in enumerate((0.3, 0.8))]
    (comparison,) = compare(runs)
    table = difference_table(run_table(comparison)).set_index("measure")
    row = table.loc["final_reward"]
    assert (row["arm"], row["minus"], row["pairs"]) == ("gspo", "grpo", 2)
    assert (row["difference"], row["low"], row["high"]) == tuple(pytest.approx(x) for x in (0.15, 0.1, 0.2))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.2, "0.200"),
        (12.0, "12.0"),
        (0, "0"),
        (150.0, "150"),
        (1234.4, "1234"),
        (0.0013, "0.00130"),
        (-0.5, "-0.500"),
    ],
)
def test_three_digits(value: float, shown: str) -> None:
    assert three_digits(value) == shown
