import math

import pytest

from moe_rl.analysis.collapse import Collapse
from moe_rl.analysis.survival import Lifetimes, kaplan_meier, log_rank

# Remission times in weeks of 42 leukaemia patients (Freireich et al., Blood 21, 1963), + censored; estimates
# below are the textbook's (Collett, Modelling Survival Data; Kleinbaum and Klein, Survival Analysis).
TREATED = "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
PLACEBO = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"


def lives(text: str) -> Lifetimes:
    words = text.split()
    return Lifetimes(
        tuple(float(word.rstrip("+")) for word in words), tuple(not word.endswith("+") for word in words)
    )


def test_the_textbooks_kaplan_meier() -> None:
    curve = kaplan_meier(lives(TREATED))
    assert (curve.n, curve.events, curve.median, curve.note) == (21, 9, 23, "")
    expected = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert {step: round(curve.at(step)[0], 3) for step in expected} == expected
    assert curve.at(6)[1:] == (pytest.approx(0.620, abs=1e-3), pytest.approx(0.952, abs=1e-3))
    assert curve.at(23)[1:] == (pytest.approx(0.188, abs=1e-3), pytest.approx(0.680, abs=1e-3))
    assert kaplan_meier(lives(PLACEBO)).median == 8


def test_kaplan_meier_by_hand() -> None:
    # five runs: one collapses at 2 (4/5), one is censored at 3, two of the three left collapse at 4 (1/3)
    curve = kaplan_meier(lives("2 3+ 4 4 9+"))
    assert curve.steps.tolist() == [0, 2, 3, 4, 9]
    assert curve.survival.tolist() == pytest.approx([1, 0.8, 0.8, 0.8 / 3, 0.8 / 3])
    assert curve.median == 4
    assert curve.at(3.5)[0] == pytest.approx(0.8)
    assert math.isnan(curve.at(10)[0])  # beyond the last run


def test_the_textbooks_log_rank() -> None:
    found = log_rank(lives(TREATED), lives(PLACEBO))
    assert found.statistic**2 == pytest.approx(16.79, abs=0.005)
    assert found.p == pytest.approx(4.17e-5, rel=1e-2)
    assert found.note == ""


def test_never_collapsed_is_censored_and_said() -> None:
    never = lives("80+ 80+ 80+")
    curve = kaplan_meier(never)
    assert (curve.events, curve.median, curve.at(80)[0]) == (0, None, 1.0)
    assert math.isnan(curve.at(80)[1])
    assert curve.note == "none of 3 collapsed by step 80: all are censored"
    found = log_rank(never, never)
    assert math.isnan(found.p) and found.note == "no test: no run of either group collapsed"
    many = lives("80+ " * 20), lives("20 30 40 " + "80+ " * 17)
    assert log_rank(*many).note == "normal approximation on 3 collapses"


def test_few_collapses_have_an_exact_p() -> None:
    # Hazards lived through are 1/4 (to 10) and 1/4 + 1/3: collapses less hazards are 3/4, 5/12, -7/12, -7/12.
    # Of the six pairs only the collapsed ones, and the pair that is left, are as far from 0 as 7/6.
    found = log_rank(lives("10 20"), lives("30+ 30+"))
    assert found.p == pytest.approx(1 / 3) and found.note == ""
    # five of eight collapsed against none: 2 * C(11, 3) of the C(16, 8) eights hold all five, or none
    found = log_rank(lives("80+ " * 8), lives("50 54 60 70 77 80+ 80+ 80+"))
    assert found.p == pytest.approx(2 * 165 / 12870)
    assert found.statistic == pytest.approx(-2.61, abs=0.03)  # the normal approximation would say 0.009


def test_all_collapsed_at_one_step() -> None:
    all_of_them = lives("20 20 20")
    curve = kaplan_meier(all_of_them)
    assert (curve.median, curve.at(20)[0], curve.note) == (20, 0.0, "all 3 collapsed")
    found = log_rank(all_of_them, all_of_them)
    assert math.isnan(found.p) and found.note == "no test: every run collapsed at the same step"


def test_one_run_and_none() -> None:
    one = kaplan_meier(lives("20"))
    assert one.note == "one run: no interval" and math.isnan(one.low[-1])
    none = kaplan_meier(Lifetimes((), ()))
    assert none.note == "no runs" and math.isnan(none.survival[0]) and none.n == 0
    assert log_rank(lives("20"), Lifetimes((), ())).note == "no test: a group has no runs"


def test_lifetimes_of_the_collapse_rule() -> None:
    found = Lifetimes.of(
        [Collapse(26, None, "reward"), Collapse(None, 40, "none"), Collapse(None, 0, "none")]
    )
    assert (found.steps, found.collapsed, found.events) == ((26.0, 40.0), (True, False), 1)
