"""Early warning on made-up runs whose onset, lead and rate of false alarms are known."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from moe_rl.analysis.claims import statements
from moe_rl.analysis.claims_warning import SUITE, warning_figure
from moe_rl.analysis.collapse import detect_collapse
from moe_rl.analysis.early_warning import (
    BASELINE,
    HORIZON,
    SIGNALS,
    Watched,
    all_signals,
    decline,
    early_warning,
    excess,
    median,
    threshold,
    watchable,
)
from moe_rl.analysis.run_files import CompactRun, config_hash

STEPS = 80


def made(seed: int, signal: Any = None, falls_at: int | None = None, suite: str = "s") -> CompactRun:
    """A run whose reward drops from 0.8 to 0.1 at a step, and whose KL is `signal`, one value a step."""
    rewards = [0.8 if falls_at is None or step < falls_at else 0.1 for step in range(1, STEPS + 1)]
    table = pd.DataFrame({"step": range(1, STEPS + 1), "reward/mean": rewards})
    if signal is not None:
        table["kl/k3"] = signal
    found = detect_collapse(rewards)
    config = {"experiment": suite, "seed": seed, "collapse": {"window": 5}}
    header = {
        "suite": suite, "arm": "grpo", "seed": seed, "config_hash": config_hash(config), "status": "done",
        "collapse": {"step": found.step, "censored_at": found.censored_at, "reason": found.reason},
        "config": config,
    }  # fmt: skip
    return CompactRun(header, table)


def noise(seed: int, size: float = 0.1) -> np.ndarray:
    return 1 + size * np.random.default_rng(seed).standard_normal(STEPS)


def with_jump(seed: int, at: int) -> np.ndarray:
    """Ten times its level from a step on; before, noise too small to raise an alarm."""
    return noise(seed, 0.02) + 9.0 * (np.arange(1, STEPS + 1) >= at)


def test_the_decline_comes_before_the_rules_step() -> None:
    run = made(0, falls_at=51)
    # trailing means of five: 0.66 < 0.9 x 0.8 at step 51; 0.38 < 0.4 first at 53, the fifth bad step is 57
    assert run.collapse.step == 57 and decline(run) == 51
    assert decline(made(0)) is None
    # a dip that recovers is not the decline
    dipped = run.table.copy()
    dipped.loc[29:30, "reward/mean"] = 0.3
    assert decline(replace(run, table=dipped)) == 51


def test_the_decline_of_a_run_that_ended_at_a_value_not_finite_is_its_step() -> None:
    run = made(0)
    header = run.header | {"collapse": {"step": 40, "censored_at": None, "reason": "non-finite loss"}}
    assert decline(CompactRun(header, run.table[:40])) == 40


def test_excess_by_hand() -> None:
    first, last = BASELINE
    values = [5.0] * (first - 1) + [1.0, 3.0] * 3 + [2.0] + [2.0, 2.0, 8.0] + [2.0] * (STEPS - last - 3)
    steps = made(0, values).steps
    # baseline 1 3 1 3 1 3 2: mean 2, standard deviation sqrt(6 / 7); three-step means 7/3, 2, 4, 4, 4, 2
    expected = np.array([1 / 3, 0, 2, 2, 2, 0]) / math.sqrt(6 / 7)
    found = excess(steps, SIGNALS["KL"])
    assert list(found.index) == list(range(last + 1, STEPS + 1))
    assert found.iloc[:6].tolist() == pytest.approx(expected)


def test_a_baseline_of_equal_values_is_given_a_tenth_of_its_mean_and_zeros_no_scale() -> None:
    flat = [2.0] * 10 + [2.5] * (STEPS - 10)
    assert excess(made(0, flat).steps, SIGNALS["KL"]).iloc[-1] == pytest.approx(0.5 / 0.2)
    zero = excess(made(0, [0.0] * 12 + [1e-9] + [0.0] * (STEPS - 13)).steps, SIGNALS["KL"])
    assert zero.loc[13] == math.inf and zero.loc[11] == zero.loc[STEPS] == 0.0


def test_a_signal_logged_every_few_steps_is_judged_at_these() -> None:
    sparse = [float(step) if step % 5 == 0 else math.nan for step in range(1, STEPS + 1)]
    found = excess(made(0, sparse).steps, SIGNALS["KL"])
    # baseline 5 and 10: mean 7.5, standard deviation 2.5
    assert found.loc[15] == pytest.approx(3.0) and list(found.index[:2]) == [15, 20]
    assert not len(excess(made(0).steps, SIGNALS["KL"]))


def test_the_ratio_tail_is_the_larger_log_of_both_ends() -> None:
    steps = pd.DataFrame({"ratio/token_min": [0.5, 0.9, 0.0], "ratio/token_max": [1.5, 4.0, 2.0]})
    assert SIGNALS["ratio tail"].read(steps).tolist() == pytest.approx([math.log(2), math.log(4), math.inf])


def test_the_threshold_is_the_lowest_that_keeps_to_both_rates() -> None:
    index = range(11, 11 + 40)

    def watched(values: list[float], fell: int | None = None) -> Watched:
        return Watched(made(0), pd.Series(values, index=index[: len(values)]), fell)

    calm = [watched([float(i), 0.0]) for i in range(1, 11)]
    assert threshold(calm, 0.1) == 9.0  # one of ten above
    assert threshold(calm[:9], 0.1) == 9.0  # none of nine
    # the 20 steps well before a decline: two may lie above, so the third highest
    fell = index[20] + HORIZON
    before = watched([float(i) for i in range(1, 21)] + [99.0] * 20, fell)
    assert threshold([before], 0.1) == 18.0 and threshold([*calm, before], 0.1) == 18.0
    assert math.isnan(threshold([watched([99.0], 12)], 0.1))


def test_a_known_lead_is_recovered() -> None:
    runs = [made(seed, noise(seed)) for seed in range(40)]
    runs += [made(seed, with_jump(seed, 51 - 6), falls_at=51) for seed in range(100, 108)]
    found = early_warning("KL", runs)
    assert (found.warned.hits, found.warned.n, found.early, found.late) == (8, 8, 0, 0)
    # one step of a jump of 90 standard deviations lifts the mean of three steps far above any threshold
    assert found.lead == (6,) * 8 and found.lead_rule == (12,) * 8
    assert found.false_alarms.n == 40 and found.false_alarms.low < 0.1 < found.false_alarms.high
    assert found.calm_steps <= 0.1 and found.too_soon == found.unjudged == 0


def test_noise_alone_raises_false_alarms_at_the_rate_that_was_set() -> None:
    runs = [made(seed, noise(seed)) for seed in range(300)]
    found = early_warning("KL", runs)
    assert found.false_alarms.n == 300 and found.collapses == 0
    assert found.false_alarms.hits / 300 == pytest.approx(0.1, abs=0.03)
    assert early_warning("KL", runs, rate=0.3).false_alarms.hits / 300 == pytest.approx(0.3, abs=0.05)


def test_a_signal_that_follows_the_collapse_does_not_warn() -> None:
    runs = [made(seed, noise(seed)) for seed in range(40)]
    runs += [made(seed, with_jump(seed, 51 + 9), falls_at=51) for seed in range(100, 106)]
    found = early_warning("KL", runs)
    assert found.warned.hits == 0 and found.late == 6 - found.early and found.early <= 1
    assert max(found.lead) == -9 and max(found.lead_rule) == -3


def test_an_alarm_far_ahead_is_false() -> None:
    runs = [made(seed, noise(seed)) for seed in range(40)]
    runs += [made(seed, with_jump(seed, 51 - HORIZON - 5), falls_at=51) for seed in range(100, 106, 2)]
    # of the other fold's seeds none collapsed, so that nothing tells the jump from noise before a decline
    found = early_warning("KL", runs)
    assert (found.early, found.warned.hits, found.warned.n) == (3, 0, 3) and found.lead == ()
    assert found.calm_steps > 0.1


def test_thresholds_come_from_other_seeds_alone() -> None:
    runs = [made(seed, noise(seed)) for seed in range(0, 20, 2)] + [made(1, with_jump(1, 40))]
    found = early_warning("KL", runs)
    assert found.false_alarms.n == 11 and found.false_alarms.hits == 1  # the odd seed, by the even ones
    alone = early_warning("KL", [made(seed, noise(seed)) for seed in range(0, 20, 2)])
    assert alone.unjudged == 10 and alone.false_alarms.n == 0


def test_runs_that_cannot_be_judged_and_repeats_are_left_out() -> None:
    never = replace(made(3), header=made(3).header | {"collapse": {
        "step": None, "censored_at": STEPS, "reason": "never earned reward"}})  # fmt: skip
    shorter = replace(made(1), table=made(1).table[:40])
    other = made(0, falls_at=50)  # another run of a seed
    kept = watchable(
        [shorter, made(0), made(0, suite="other"), made(1), other, made(2, suite="recovery"), never]
    )
    assert [(run.suite, run.seed, len(run.steps)) for run in kept] == [
        ("s", 0, STEPS), ("s", 1, STEPS), ("s", 0, STEPS)
    ]  # fmt: skip


def test_a_decline_before_a_signal_is_judged_is_counted_apart() -> None:
    runs = [made(seed, noise(seed)) for seed in range(20)] + [made(100, with_jump(100, 5), falls_at=9)]
    found = early_warning("KL", runs)
    assert (found.warned.hits, found.warned.n, found.too_soon, found.collapses) == (0, 0, 1, 1)


def test_a_signal_of_every_fifth_step_is_first_judged_at_the_fifteenth() -> None:
    def drifting(seed: int, **more: Any) -> CompactRun:
        run = made(seed, noise(seed), **more)
        run.table["drift/old"] = run.table["kl/k3"].where(run.table["step"] % 5 == 0)
        return run

    runs = [drifting(seed) for seed in range(20)] + [drifting(seed, falls_at=14) for seed in (100, 101)]
    assert early_warning("drift", runs).too_soon == 2 and early_warning("KL", runs).too_soon == 0


def test_where_nothing_can_be_clipped_there_is_no_clip_fraction() -> None:
    runs = [made(seed, noise(seed)) for seed in range(20)]
    for run in runs:
        run.table["clip_frac/token"] = run.table["kl/k3"]
    assert [found.signal for found in all_signals(runs)] == ["KL", "reward, falling"]
    for run in runs:
        run.config["objective"] = {"clip_low": 0.2}
    assert "clip fraction" in [found.signal for found in all_signals(runs)]


def test_median() -> None:
    assert (median([3, 1, 2]).value, median([3, 1, 2]).low, median([3, 1, 2]).high) == (2, 1, 3)
    five = median([1, 2, 3, 4, 100])
    assert five.value == 3 and 1 <= five.low < 3 < five.high <= 100
    assert median([4] * 6) == replace(five, n=6, value=4.0, low=4.0, high=4.0)
    assert median([]).n == 0 and math.isnan(median([]).value)


def test_statements_and_figure() -> None:
    runs = [made(seed, noise(seed)) for seed in range(40)]
    assert warning_figure(runs) is None
    (only,) = statements(runs)
    assert "none of 40 runs collapsed" in only.measured and only.suite == SUITE
    runs += [made(seed, with_jump(seed, 51 - 6), falls_at=51) for seed in range(100, 106)]
    assert [found.signal for found in all_signals(runs)] == ["KL", "reward, falling"]
    kl, reward = statements(runs)
    assert "KL: warned of 6 of 6 collapses" in kl.measured
    assert "median lead 6 steps to the decline and 12 to the rule's step" in kl.measured
    assert kl.interval.startswith("warned 95 % exact: 0.54 to 1; lead 95 %: 6 to 6; false alarms 95 % exact")
    assert kl.n == "6 collapses, 40 runs without" and len(kl.runs) == 46
    # the control: the reward itself falls with the decline, not before
    assert "reward, falling: warned of 0 of 6" in reward.measured and "median lead 0 steps" in reward.measured
    figure = warning_figure(runs)
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "KL (6 alarms; could warn of 6 of 6)", "reward, falling (6 alarms; could warn of 6 of 6)",
    ]  # fmt: skip
