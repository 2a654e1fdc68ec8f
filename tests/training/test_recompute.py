"""`rollout.recompute=false`: the sampler's log-probabilities in place of an old-policy pass (GSPO §5.4)."""

from dataclasses import replace

import pytest
import torch

from moe_rl.training import passes
from moe_rl.training.config import InterventionConfig, MismatchConfig, ReplayConfig, RolloutConfig

ROUNDING = 2e-5  # nats; cached decoding against the teacher-forced forward, float32
TRUSTED = RolloutConfig(prompts=4, responses=4, max_new_tokens=6, recompute=False)


def weights(lm):
    return {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_with_a_float32_sampler_the_run_is_the_recomputing_one_up_to_rounding(
    tmp_path, fresh, objective, run, config
):
    """Clip ranges are wide here: rounding may carry a ratio at 3e-4 over its bound."""
    clip = {"clip_low": 0.5, "clip_high": 0.5}
    lm = fresh()
    with_pass = run(tmp_path / "with", lm, config(steps=2, drift_every=0), objective, **clip)
    recomputed = weights(lm)
    without = config(steps=2, drift_every=0, rollout=TRUSTED)
    trusted = run(tmp_path / "without", fresh(), without, objective, **clip)
    moved = 0.0
    for name, tensor in weights(lm).items():
        assert torch.allclose(tensor, recomputed[name], atol=1e-4), name
        moved = max(moved, (tensor - weights(fresh())[name]).abs().max().item())
    assert moved > 1e-2, "far more than the two differ by"
    for name in ("reward/mean", "response/length"):
        assert trusted.steps()[name].tolist() == with_pass.steps()[name].tolist()
    assert trusted.steps()["entropy"].tolist() == pytest.approx(
        with_pass.steps()["entropy"].tolist(), abs=1e-5
    )
    first = trusted.updates().query("update == 1")
    assert first["ratio/token_max"].tolist() == pytest.approx([1.0, 1.0], abs=ROUNDING)
    assert with_pass.updates().query("update == 1")["ratio/token_max"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("objective", "options", "passes_run"),
    [
        ("grpo", {"drift_every": 0}, 0),
        ("grpo", {"drift_every": 2}, 1),
        ("grpo", {"drift_every": 0, "replay": ReplayConfig("rollout")}, 0),
        ("ppo", {"drift_every": 0}, 2),
        ("rspo", {"drift_every": 0}, 2),
    ],
)
def test_the_pass_is_run_only_where_it_is_needed(
    tmp_path, lm, monkeypatch, objective, options, passes_run, run, config
):
    count, real = 0, passes.old_policy_pass

    def counted(*args):
        nonlocal count
        count += 1
        return real(*args)

    monkeypatch.setattr(passes, "old_policy_pass", counted)
    steps = run(tmp_path, lm, config(steps=2, rollout=TRUSTED, **options), objective).steps()
    assert count == passes_run
    # what a pass saw of the sampler is logged where there was one
    if passes_run:
        assert int(steps["mismatch/kl_k3"].notna().sum()) == passes_run
        assert steps["mismatch/logp_abs_diff_max"].max() < ROUNDING
    else:
        assert "mismatch/kl_k3" not in steps


def test_an_engine_with_numerics_of_its_own_enters_the_ratio(tmp_path, fresh, run, config):
    rounded = replace(TRUSTED, sampler_dtype="bfloat16")
    options = config(steps=1, drift_every=1, rollout=rounded)
    trusted = run(tmp_path / "trusted", fresh(), options)
    first = trusted.updates().iloc[0]
    assert first["ratio/token_std"] > 100 * ROUNDING, "the first ratio is π_θ/μ"
    recomputed = run(tmp_path / "pass", fresh(), replace(options, rollout=replace(rounded, recompute=True)))
    assert recomputed.updates()["ratio/token_std"][0] == 0.0
    for name in ("mismatch/kl_k3", "mismatch/chi2_token"):
        assert trusted.steps()[name][0] == recomputed.steps()[name][0] != 0.0


def test_rollout_replay_needs_no_pass(tmp_path, fresh, run, config):
    """The sampler's experts with the sampler's log-probabilities: of one engine, so the first ratio is 1."""
    options = config(steps=2, drift_every=0, rollout=TRUSTED, replay=ReplayConfig("rollout"))
    updates = run(tmp_path, fresh(), options).updates()
    assert updates.query("update == 1")["ratio/token_max"].tolist() == pytest.approx([1, 1], abs=ROUNDING)
    assert updates.query("update == 2")["replay/overridden"].gt(0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": ReplayConfig("old_policy")}, "old_policy replays the experts of the old-policy pass"),
        ({"mismatch": MismatchConfig("token_tis")}, "weighs by π_old/μ, which is 1"),
        (
            {"intervention": InterventionConfig(expert_changes=0.1)},
            "swaps the experts of the old-policy pass",
        ),
    ],
)
def test_what_needs_the_pass_is_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(rollout=TRUSTED, **options).check()
    config(**options).check()
