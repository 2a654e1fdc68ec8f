"""Statements on what the paper left open, from made-up tables whose numbers can be worked out by hand."""

import numpy as np
import pytest

from moe_rl.analysis.claims import statements
from moe_rl.analysis.claims_open import growth
from moe_rl.analysis.comparison import said, told_apart
from moe_rl.analysis.contrasts import cells_of, contrasts
from moe_rl.analysis.evidence import final_reward
from moe_rl.analysis.evidence_figures import draw_all
from moe_rl.store import StoreError

from .test_evidence import level, made, row

SEEDS = range(8)


def columns(run, **values):
    """The run with further columns."""
    for name, value in values.items():
        run.table[name.replace("__", "/")] = value
    return run


def test_contrasts_hold_the_context_fixed():
    runs = [
        made("x", arm, seed, level(base + 0.1 * (ahead == 6) * (arm == "grpo")), rollout__ahead=ahead)
        for arm, base in (("grpo", 0.4), ("gspo", 0.6))
        for seed in range(3)
        for ahead in (0, 6)
    ]
    found = {c.words: c for c in contrasts(runs, "rollout.ahead", 0, ("arm", "steps"), final_reward)}
    assert set(found) == {"grpo", "gspo"}, "steps are the same for all and not named"
    assert found["grpo"].difference.summary.mean == pytest.approx(0.1)
    assert found["gspo"].difference.summary.mean == pytest.approx(0.0)
    assert (found["grpo"].value, found["grpo"].base, len(found["grpo"].runs)) == (6, 0, 6)
    assert found["grpo"].gains == pytest.approx({0: 0.1, 1: 0.1, 2: 0.1})
    assert contrasts(runs, "rollout.ahead", 3, ("arm",), final_reward) == []
    other = made("x", "grpo", 0, level(0.4), rollout__ahead=6, objective__clip_low=0.1)
    with pytest.raises(StoreError, match="are both seed 0 of one arm: they differ in a setting that is not"):
        contrasts([*runs, other], "rollout.ahead", 0, ("arm",), final_reward)
    assert {name: len(group) for name, group in cells_of(runs, ("arm",)).items()} == {"grpo": 6, "gspo": 6}


def test_settings_are_said_as_people_say_them():
    assert said("rollout.recompute", False) == "π_old from the sampler"
    assert said("model.config.num_experts_per_tok", 4) == "top-4"
    assert told_apart([{"advantages_by": "turn", "steps": 3}, {"advantages_by": "response"}]) == [
        "advantages by turn, steps=3",
        "advantages by response, steps=absent",
    ]
    assert said("optim.lr", 1e-4) == "optim.lr=0.0001"
    runs = [made("x", "grpo", seed, level(0.4), model__name="dense", model__config=None) for seed in SEEDS]
    runs += [
        made("x", "grpo", seed, level(0.4), model__name="tiny", model__config={"num_experts": 16})
        for seed in SEEDS
    ]
    cells = cells_of(runs, ("model.name", "model.config.num_experts"))
    assert {name: len(group) for name, group in cells.items()} == {"dense": 8, "tiny, 16 experts": 8}


def test_skipping_the_pass_by_arm():
    runs = []
    for seed in SEEDS:
        for arm, lost in (("grpo", 0.2), ("gspo", 0.0)):
            for redo in (True, False):
                run = made("recompute", arm, seed, level(0.5 - lost * (not redo)), rollout__recompute=redo)
                run = columns(run, time__total=1.0 if redo else 0.8, time__old_policy=0.25 * redo)
                every_fifth = run.table["step"] % 5 == 0  # measures drift, and runs the pass for that
                run.table["drift/old"] = np.where(every_fifth, 0.01, np.nan)
                runs.append(
                    columns(run, time__total=run.table["time/total"] + every_fifth, mismatch__kl_k3=0.005)
                )
        run = made("recompute", "grpo+rollout_replay", seed, level(0.5), rollout__recompute=True)
        runs.append(columns(run, mismatch__kl_k3=0.001))
    lost = row(runs, "grpo: final reward, π_old from the sampler − π_old recomputed: -0.2")
    # 8 pairs of one sign: 2 of 256 sign patterns, times 2 comparisons
    assert "p = 0.016" in lost.measured and "they differ" in lost.measured and lost.n == "8 pairs"
    assert "not separated" in row(runs, "gspo: final reward").measured
    # all that GSPO's differences are above GRPO's is seen in every pair: 2 of 256 patterns, one comparison
    less = row(runs, "gspo (+0) − grpo (-0.2): +0.2")
    assert "(p = 0.008: they differ)" in less.measured and len(less.runs) == 32
    closer = row(runs, "KL(μ‖π_old) per token, nats, grpo+rollout_replay − grpo: -0.004")
    assert "(p = 0.008: they differ)" in closer.measured and len(closer.runs) == 16
    saved = row(
        runs, "grpo: the old-policy pass takes 25 % of a step where it is run, 0 % where it is skipped"
    )
    assert saved.n == "8" and len(saved.runs) == 16


def test_partial_rollouts_show_what_they_are_made_of():
    runs = []
    for seed in SEEDS:
        for ahead in (0, 6):
            run = made(
                "partial_rollout", "grpo", seed, level(0.5), rollout__ahead=ahead, rollout__recompute=True
            )
            if ahead:
                run = columns(
                    run, mismatch__kl_k3_older=0.02, mismatch__kl_k3_current=0.001, rollout__older_tokens=0.45
                )
            runs.append(run)
    assert "6 tokens a step older − no token older: +0" in row(runs, "final reward").measured
    for seed in SEEDS:
        runs.append(
            made("partial_rollout", "grpo", seed, level(0.7), rollout__ahead=6, rollout__recompute=False)
        )
    assert row(runs, "π_old from the sampler −").measured.startswith(
        "final reward of partial rollouts, π_old from the sampler − π_old recomputed: +0.2"
    )
    runs = [run for run in runs if run.config["rollout"]["recompute"]]
    made_of = row(runs, "of tokens from older weights")
    assert made_of.measured == (
        "grpo: 0.450 of tokens from older weights; KL(μ‖π) per token, π the trainer's forward of the current "
        "weights: 0.0200 nats on them, 0.00100 on the others"
    )


def test_turns_by_objective_and_the_identity():
    runs = []
    for seed in SEEDS:
        runs.append(made("two_turn", "gspo", seed, level(0.5), advantages_by="response"))
        for by in ("response", "turn"):
            runs.append(
                made("two_turn", "gspo_token", seed, level(0.5 + 0.1 * (by == "turn")), advantages_by=by)
            )
    assert "+0.1" in row(runs, "advantages by turn − advantages by response").measured
    assert "gspo_token − gspo: +0" in row(runs, "final reward, gspo_token − gspo").measured


def test_growth_of_lengths():
    runs = []
    for seed in SEEDS:
        for mode, slope in (("seq-mean-token-mean", 1.0), ("token-mean", 0.5)):
            run = made("length_growth", "grpo", seed, level(0.5), objective__aggregation=mode)
            steps = run.table["step"].to_numpy(float)
            run.table["response/length"] = np.where(steps > 0, 10 + slope * steps, np.nan)
            runs.append(columns(run, response__length_better=12.0, response__length_worse=15.0))
    # of 20 steps two are 10 %: 10 + 1.5 slope against 10 + 19.5 slope
    assert growth(runs[0]) == pytest.approx(18.0) and growth(runs[1]) == pytest.approx(9.0)
    halved = row(runs, "grpo (loss by token-mean): +9 tokens")
    assert halved.measured.endswith("mean reward have 12.0, those below 15.0")
    measured = row(runs, "growth in tokens").measured
    assert "loss by token-mean − loss by seq-mean-token-mean: -9" in measured


def test_gspo_without_group_normalisation():
    runs = [
        made("length_growth", "gspo", seed, level(reward), advantages=advantages)
        for seed in SEEDS
        for advantages, reward in (("paper", 0.6), ("mean", 0.5), ("none", 0.2))
    ]
    assert (
        "Â = reward − Â normalised in its group: -0.4" in row(runs, "gspo, final reward, Â = reward").measured
    )
    assert (
        "Â without ÷ std − Â normalised in its group: -0.1"
        in row(runs, "gspo, final reward, Â without").measured
    )


def test_models_are_compared_within_themselves():
    runs = []
    for seed in SEEDS:
        for name, gain in (("tiny", 0.2), ("dense", 0.0)):
            runs.append(made("dense_control", "grpo", seed, level(0.4), collapse=5, model__name=name))
            runs.append(made("dense_control", "gspo", seed, level(0.4 + gain), model__name=name))
    assert "+0.2" in row(runs, "tiny: final reward, gspo − grpo").measured
    assert "+0 (" in row(runs, "dense: final reward, gspo − grpo").measured
    figure = draw_all(runs)["dense_control_arms"]
    assert figure.axes[0].get_xlabel() == "final reward less that with grpo"
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["tiny, gspo (n = 8)", "dense, gspo (n = 8)"]
    lost = [s for s in statements(runs) if "collapsed" in s.measured and "drift" in s.claim]
    more, rank = row(runs, "gspo − grpo, tiny (+0.2) − dense"), row(runs, "grpo on the MoE and on")
    assert "(+0): +0.2 (p = 0.008: they differ)" in more.measured
    assert "8 of 8 against 8 of 8 collapsed (no test: every run collapsed at the same step)" in rank.measured
    assert len(lost) == 2 and all("8 of 8 collapsed" in s.measured for s in lost)
    assert lost[0].measured.startswith("tiny: 1 % of experts changed by a first update")
