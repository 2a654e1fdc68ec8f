"""Statements and figures from made-up tables of runs, whose numbers can be worked out by hand."""

import copy
import math
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pandas as pd
import pytest

from moe_rl.analysis.claims import statements
from moe_rl.analysis.clip_grid import clip_scale
from moe_rl.analysis.evidence import arms_of, difference, final_reward, limit, reward_at_unclipped
from moe_rl.analysis.evidence_figures import draw_all, iqm_bands, step_curves, token_curves
from moe_rl.analysis.evidence_report import BEGIN, END, insert_table, write_evidence
from moe_rl.analysis.recovery import outcomes
from moe_rl.analysis.regimes import dose_effects, dose_pairs, matched_controls, regime_differences
from moe_rl.analysis.run_files import CompactRun, config_hash, write_compact
from moe_rl.store import StoreError

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "convergence.ipynb"
CONFIG: dict[str, Any] = {
    "steps": 20,
    "objective": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.27},
    "replay": {"source": None},
    "intervention": {"expert_changes": None, "log_ratio_noise": 0.0},
    "optim": {"lr": 3e-4, "minibatches": 4, "freeze_routers": False},
    "rollout": {"max_new_tokens": 14, "length_schedule": []},
    "task": {"name": "sort", "min_length": 12},
    "model": {"path": None},
}


def made(
    suite: str,
    arm: str,
    seed: int,
    rewards: list[float],
    collapse: int | None = None,
    clip: float = 0.002,
    kl: float = 0.001,
    **changes: Any,
) -> CompactRun:
    """A run of 100 trained tokens a step; `changes` are settings by dotted key, __ for the dot."""
    config = copy.deepcopy(CONFIG) | {"arm": arm, "seed": seed}
    config["objective"]["name"] = arm.partition("+")[0]
    if arm.startswith("gspo"):
        config["objective"] |= {"clip_low": 3e-4, "clip_high": 4e-4}
    if arm.endswith("replay"):
        config["replay"]["source"] = "rollout" if "rollout" in arm else "old_policy"
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section] = value if not name else config[section] | {name: value}
    n = len(rewards)
    table = pd.DataFrame(
        {
            "step": range(1, n + 1),
            "reward/mean": rewards,
            "response/length": 13.0,
            "clip_frac/token": clip,
            "drift/first": 0.01,
            "drift/old": 0.04,
            "kl/k3": kl,
            "tokens/trained": 100.0,
            "tokens/unclipped": 100.0 * (1 - clip),
        }
    )
    evals = pd.DataFrame({"step": [0, n // 2, n], "eval/greedy": [0.3, rewards[n // 2 - 1], rewards[-1]]})
    header = {
        "suite": suite,
        "arm": arm,
        "seed": seed,
        "config_hash": config_hash(config),
        "status": "done",
        "collapse": {
            "step": collapse,
            "censored_at": None if collapse else n,
            "reason": "reward" if collapse else "none",
        },
        "config": config,
        "command": ["python", "-m", "experiments.train", f"arm={arm}", f"seed={seed}"],
    }
    return CompactRun(header, table.merge(evals, on="step", how="outer"))


def level(value: float, n: int = 20) -> list[float]:
    return [value] * n


@pytest.fixture
def fig1() -> list[CompactRun]:
    """Six seeds: gspo is 0.2 above grpo, replay half a percent off it; two grpo runs collapse."""
    runs = []
    for seed in range(6):
        base = 0.4 + 0.01 * seed
        runs.append(made("fig1_sort", "grpo", seed, level(base), collapse=12 if seed < 2 else None))
        runs.append(made("fig1_sort", "grpo+replay", seed, level(base + 0.005 * (-1) ** seed)))
        runs.append(made("fig1_sort", "gspo", seed, level(base + 0.2), clip=0.2))
    return runs


def row(runs: list[CompactRun], words: str) -> Any:
    (found,) = [statement for statement in statements(runs) if words in statement.measured]
    return found


def test_paired_differences_and_their_tests(fig1: list[CompactRun]) -> None:
    gspo = row(fig1, "final reward, gspo − grpo:")
    # 6 pairs, all +0.2: 2 of 64 sign patterns are as extreme, and Holm takes that times 3 comparisons
    assert "+0.2 (p = 0.094" in gspo.measured and "not separated" in gspo.measured
    assert gspo.n == "6 pairs" and gspo.interval == "95 %: +0.2 to +0.2"
    assert "0 of 6 against 2 of 6 collapsed" in gspo.measured
    replay = row(fig1, "final reward, grpo+replay − grpo:")
    assert "+0 (p = 1.000" in replay.measured
    assert len(replay.runs) == 12 and replay.runs[0].startswith("fig1_sort/grpo+replay-")
    forced = row(fig1, "final greedy accuracy, grpo+replay − grpo:")
    assert "+0 (p = 1.000" in forced.measured and forced.measured.endswith("grpo 0.425")
    assert (forced.claim, forced.source) == ("Routing Replay may limit the model's capacity", "§5.3")


def test_enough_seeds_let_a_difference_be_claimed() -> None:
    runs = [made("fig1_sort", arm, s, level(0.4 + 0.2 * (arm == "gspo") + 0.01 * s), clip=0.1)
            for s in range(8) for arm in ("grpo", "gspo")]  # fmt: skip
    assert "p = 0.008: they differ" in row(runs, "final reward, gspo − grpo: +0.2 (").measured
    few = [run for run in runs if run.seed < 3]
    found = row(few, "final reward, gspo − grpo: +0.2 (")
    assert "3 pairs give no p below 0.25: not separated" in found.measured
    assert found.interval == "range of 3: +0.2 to +0.2"


def test_arms_that_never_collapse_say_so(fig1: list[CompactRun]) -> None:
    gspo = row(fig1, "gspo: 0 of 6 collapsed")
    assert "none of 6 collapsed by step 20: all are censored" in gspo.measured
    assert gspo.interval == "95 %: 0 to 0.46 of runs (exact)"
    calm = [run for run in fig1 if run.collapse.step is None and run.seed > 1]
    assert "no test: no run of either group collapsed" in row(calm, "final reward, gspo − grpo:").measured


def test_clip_fractions_are_compared_as_ratios(fig1: list[CompactRun]) -> None:
    found = row(fig1, "of tokens: ")
    assert "0.2 against 0.002 of tokens: 100 times" in found.measured
    assert found.interval == "95 %: 100 to 100"


def test_reward_at_equal_unclipped_tokens() -> None:
    rising = [0.1 * step for step in range(1, 11)]
    fast, slow = (
        made("fig1_sort", "gspo", 0, rising, clip=0.5),
        made("fig1_sort", "grpo", 0, rising, clip=0.0),
    )
    # 500 unclipped tokens: ten steps of 50, and five of 100; rewards are the means of the last five steps
    assert reward_at_unclipped(fast, 500) == pytest.approx(0.8)
    assert reward_at_unclipped(slow, 500) == pytest.approx(0.3)
    assert math.isnan(reward_at_unclipped(fast, 501))
    assert "after 500 unclipped tokens" in row([fast, slow], "gspo − grpo: +0.5 (").measured


def test_clip_grid() -> None:
    runs = []
    for scale, clip in ((0.5, 0.4), (1.0, 0.2), (2.0, 0.1)):
        for seed in range(5):
            runs.append(made("fig2_clip", "grpo", seed, level(0.5), clip=0.002 / scale,
                             objective__clip_low=0.2 * scale, objective__clip_high=0.27 * scale))  # fmt: skip
            gspo_range = {"objective__clip_low": 3e-4 * scale, "objective__clip_high": 4e-4 * scale}
            runs.append(made("fig2_clip", "gspo", seed, level(0.7), clip=clip, **gspo_range))
    assert clip_scale(runs[0]) == 0.5 and clip_scale(runs[-1]) == 2.0
    assert clip_scale(made("fig2_clip", "grpo", 0, level(0.5), objective__clip_low=0.1)) is None
    gap = row(runs, "widest against narrowest")
    assert "× 0.5: 100, × 1: 100, × 2: 100; widest against narrowest range: × 1 (p = 1" in gap.measured
    assert row(runs, "gspo, final greedy").n == "5 pairs"


def test_regimes_are_named_by_what_is_off_the_usual() -> None:
    runs = []
    for lr in (3e-4, 1e-3):
        for seed in range(3):
            runs.append(made("search", "grpo", seed, level(0.5), optim__lr=lr))
            runs.append(made("search", "grpo+replay", seed, level(0.5 + 100 * (lr - 3e-4)), optim__lr=lr))
    runs.append(made("search", "gspo", 0, level(0.9), optim__minibatches=16))
    found = {regime.regime: regime.difference.summary.mean for regime in regime_differences(runs)}
    assert found == {"the usual settings": 0.0, "optim.lr=0.001": pytest.approx(0.07)}
    assert "in 2 regimes: 1 above 0; the largest +0.07 at optim.lr=0.001" in row(runs, "regimes").measured


def test_each_arms_own_best_learning_rate() -> None:
    runs = []
    for seed in range(4):
        for lr, reward in ((1e-4, 0.5), (3e-4, 0.6), (1e-3, 0.1)):
            runs.append(made("search", "grpo", seed, level(reward), optim__lr=lr))
        runs.append(made("search", "grpo", seed, level(0.9), optim__lr=3e-4, optim__minibatches=16))
    found = row(runs, "final reward by learning rate")
    assert found.measured == (
        "grpo, final reward by learning rate: 0.0001: 0.500, 0.0003: 0.600, 0.001: 0.100; "
        "best 0.0003 (chosen after the fact)"
    )
    assert found.n == "4 a rate" and found.interval == "range of 4: 0.6 to 0.6 at 0.0003"
    assert len(found.runs) == 12
    lower = [made("search_rates", "gspo", 0, level(r), optim__lr=lr) for lr, r in ((3e-5, 0.7), (1e-4, 0.5))]
    (only,) = [s for s in statements(lower) if s.suite == "search_rates"]
    assert only.measured.endswith("best 3e-05, the lowest tried (chosen after the fact)")


def test_doses_and_controls() -> None:
    runs = []
    for seed in range(5):
        runs += [
            made("intervention", "grpo", seed, level(0.8)),
            made("intervention", "grpo", seed, level(0.7), optim__freeze_routers=True),
            made("intervention", "grpo", seed, level(0.6), kl=0.02, intervention__expert_changes=0.2),
            made("intervention", "grpo+replay", seed, level(0.75), intervention__expert_changes=0.2),
            made("intervention", "grpo+replay", seed, level(0.8), intervention__expert_changes=0.0),
            made("intervention", "grpo", seed, level(0.8), intervention__expert_changes=0.0),
            made("intervention", "gspo", seed, level(0.7), intervention__expert_changes=0.2),
            made("intervention", "grpo", seed, level(0.65), kl=0.015, intervention__log_ratio_noise=0.2),
            made("intervention", "grpo", seed, level(0.79), kl=0.002, intervention__log_ratio_noise=0.05),
        ]
    (dose,) = dose_pairs(runs)
    assert (dose.objective, dose.dose, dose.difference.n) == ("grpo", 0.2, 5)
    assert dose.difference.summary.mean == pytest.approx(-0.15)
    frozen, noise = matched_controls(runs)
    assert frozen.difference.summary.mean == pytest.approx(-0.1)
    assert "noise of 0.2 nats (KL 0.015, the nearest)" in noise.words
    assert noise.difference.summary.mean == pytest.approx(-0.05)
    (effect,) = dose_effects(runs)  # gspo has no dose of 0 to compare with
    assert (effect.objective, effect.dose, effect.difference.n) == ("grpo", 0.2, 5)
    assert effect.difference.summary.mean == pytest.approx(-0.2)
    assert "-0.2 (p = 0.062" in row(runs, "grpo: final reward with 20 % of experts changed").measured


def test_what_becomes_of_collapsed_runs() -> None:
    # the mean of five steps is below 0.9 * 0.8 for good from step 11 on, before which it was 0.8
    source = made("fig1_sort", "grpo", 3, [0.5] * 5 + [0.8] * 5 + [0.1] * 10, collapse=15)
    healthy = made("fig1_sort", "grpo", 4, [0.4] * 10 + [0.9] * 10)

    def go_on(reward: float, start: str, of: CompactRun = source, **changes: Any) -> CompactRun:
        folder = f"outputs/fig1_sort/grpo-{of.header['config_hash']}/seed{of.seed}"
        seed = changes.pop("seed", of.seed)
        return made("recovery", "grpo", seed, level(reward), model__path=f"{folder}/{start}", **changes)

    broken = go_on(0.9, "final", objective__clip_low=0.1)
    broken.header["status"] = "collapsed"
    runs = [
        go_on(0.1, "snapshots/step_15"),
        go_on(0.73, "snapshots/step_10"),
        go_on(0.71, "snapshots/step_10", objective__clip_low=0.1),
        go_on(0.2, "final", seed=13),
        broken,
        go_on(0.37, "snapshots/step_10", healthy),
        go_on(0.80, "final", healthy),
        made("recovery", "grpo", 4, level(0.9), model__path="elsewhere/final"),
    ]
    everything = [source, healthy, *runs]
    found = {
        outcome.words: (outcome.healthy, outcome.recovered, len(outcome.regained))
        for outcome in outcomes(runs, everything)
    }
    assert found == {
        "from the collapsed model, nothing changed": (False, 0, 1),
        "from the collapsed model, other queries": (False, 0, 1),
        "from the collapsed model, clip range retuned": (False, 0, 1),  # no longer finite at its end
        "left alone, to its own last step": (False, 0, 1),
        "rolled back to before the decline, nothing changed": (False, 1, 1),  # 90 % of 0.8 is 0.72
        "rolled back to before the decline, clip range retuned": (False, 0, 1),
        "healthy, from its middle, nothing changed": (True, 1, 1),  # 90 % of 0.4
        "healthy, from its end, nothing changed": (True, 0, 1),  # 0.8 is less than 90 % of 0.9
    }
    kept = [o.regained for o in outcomes(runs, everything) if o.words.startswith("rolled back")]
    assert kept == [pytest.approx((0.71 / 0.8,)), pytest.approx((0.73 / 0.8,))]
    rows = [s for s in statements(everything) if s.suite == "recovery"]
    assert len(rows) == 8 and all("(exact)" in s.interval for s in rows)
    assert sum(s.claim.startswith("no claim") for s in rows) == 2


def test_two_cold_starts_pair_within_each() -> None:
    runs = [
        made(suite, arm, seed, level(base + gain))
        for suite, base in (("fig1_sort", 0.4), ("fig1_sort_again", 0.6))
        for arm, gain in (("grpo", 0.0), ("gspo", 0.1))
        for seed in range(4)
    ]
    found = row(runs, "both cold starts together: final reward, gspo − grpo")
    assert "+0.1 (p = 0.008: they differ); 0 of 8 against 0 of 8" in found.measured and found.n == "8 pairs"
    assert len(found.runs) == 16
    assert not [s for s in statements(runs[:8]) if "both cold starts" in s.measured]


def test_longer_training() -> None:
    runs = [
        made("fig1_longer", "gspo", seed, level(0.5, 10) + level(0.7, 10),
             rollout__length_schedule=[[11, 20], [15, 24]])
        for seed in range(3)
    ]  # fmt: skip
    found = row(runs, "before generation was first lengthened (step 11)")
    assert "longest limit: +0.2 (p = 0.250; 3 pairs give no p below 0.25" in found.measured
    assert found.n == "3 pairs"
    for run in runs:
        run.config["rollout"]["query_set_steps"] = 20
    for seed in range(3):
        for arm, reward, steps in (("gspo", 0.6, None), ("grpo", 0.5, 20)):
            runs.append(
                made("fig1_longer", arm, seed, level(reward), rollout__length_schedule=[[11, 20]],
                     rollout__query_set_steps=steps)
            )  # fmt: skip
    measured = [s.measured for s in statements(runs) if s.suite == "fig1_longer"]
    assert [words.partition(" (p")[0] for words in measured[-2:]] == [
        "gspo: greedy accuracy at the end, queries replaced every 20 steps − the same queries throughout: "
        "+0.1",
        "queries replaced every 20 steps: greedy accuracy at the end, gspo − grpo: +0.2",
    ]


def test_a_family_too_large_for_its_pairs_is_said() -> None:
    found = difference("a", "b", {"a": [made("s", "grpo", seed, level(0.5)) for seed in range(8)],
                                  "b": [made("s", "grpo", seed, level(0.4)) for seed in range(8)]},
                       final_reward)  # fmt: skip
    assert limit(found) == limit(found, 6) == ""  # 6 / 2^7 is 0.047
    assert limit(found, 14) == "; 8 pairs give no p below 0.109 among 14 comparisons"


def test_a_run_that_is_no_longer_finite_ends_with_nothing() -> None:
    run = made("fig1_sort", "grpo", 0, level(0.9))
    assert final_reward(run) == pytest.approx(0.9)
    run.header["status"] = "collapsed"
    assert final_reward(run) == 0.0


def test_arms_of_other_settings_are_told_apart() -> None:
    runs = [made("fig1_sort", "grpo", 0, level(0.5), optim__lr=lr) for lr in (1e-4, 3e-4)]
    assert list(arms_of(runs)) == ["grpo (optim.lr=0.0001)", "grpo (optim.lr=0.0003)"]


def test_curves_and_bands(fig1: list[CompactRun]) -> None:
    curves = step_curves(fig1, "reward/mean")
    band = iqm_bands(curves)
    grpo = band[(band["arm"] == "grpo") & (band["x"] == 7)].iloc[0]
    assert grpo["n"] == 6 and grpo["iqm"] == pytest.approx(np.mean([0.41, 0.42, 0.43, 0.44]))
    tokens = token_curves(fig1, grid=5)
    last = tokens.groupby("arm")["x"].max()
    assert last["gspo"] == pytest.approx(20 * 80) and last["grpo"] == pytest.approx(20 * 99.8)


def test_everything_is_written_from_the_files_alone(tmp_path: Path, fig1: list[CompactRun]) -> None:
    for run in fig1:
        write_compact(run, tmp_path / "runs")
    assert {s.measured.partition(":")[0] for s in statements(fig1) if s.headline} >= {
        "final reward, grpo+replay − grpo", "final reward, gspo − grpo"
    }  # fmt: skip
    rows = write_evidence(tmp_path, {"fig1_sort": "make evidence size=full block=fig1_sort"})
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "fig1_sort_convergence.png", "fig1_sort_survival.png", "fig1_sort_efficiency.png",
        "early_warning.png",
    }  # fmt: skip
    page = (tmp_path / "claims.md").read_text()
    assert page.count("\n| ") == 1 + len(rows) and "`make evidence size=full block=fig1_sort`" in page
    table = pd.read_csv(tmp_path / "claims.csv")
    assert table["runs"].str.split().str.len().tolist() == [len(r.runs) for r in rows]
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 18
    with pytest.raises(StoreError, match="no tables of runs"):
        write_evidence(tmp_path / "empty", {})


def test_the_readmes_table_is_replaced_between_its_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    insert_table(readme, "| new |\n")
    insert_table(readme, "| new |\n")
    assert readme.read_text() == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    readme.write_text("nothing")
    with pytest.raises(StoreError, match="evidence: begin"):
        insert_table(readme, "x")


def test_every_kind_of_figure(fig1: list[CompactRun]) -> None:
    runs = [
        *fig1,
        *(made("search", arm, s, level(0.5)) for arm in ("grpo", "grpo+replay") for s in range(2)),
        *(made("intervention", "grpo", s, level(0.5), intervention__expert_changes=0.1) for s in range(2)),
        *(made("fig2_clip", arm, 0, level(0.5)) for arm in ("grpo", "gspo")),
        made("fig1_longer", "gspo", 0, level(0.5)),
    ]
    assert draw_all(runs).keys() == {
        "fig1_longer_longer", "fig1_sort_convergence", "fig1_sort_efficiency", "fig1_sort_survival",
        "fig2_clip_clip_grid", "intervention_doses", "search_regimes", "early_warning",
    }  # fmt: skip


def test_the_notebook_draws_the_tables_it_is_given(tmp_path: Path, fig1: list[CompactRun]) -> None:
    for run in fig1:
        write_compact(run, tmp_path / "runs")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.startswith("RESULTS = ")
    first.source = f"RESULTS = {str(tmp_path)!r}"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 3
    tables = " ".join(out["data"].get("text/html", "") for out in outputs if "data" in out)
    assert "none of 6 collapsed by step 20: all are censored" in tables
    assert "gspo − grpo: +0.2" in tables
