import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_rl.routing import record_routing
from moe_rl.store import Run
from moe_rl.training.config import OptimConfig, ReplayConfig

STEPS = 4


def untimed(run: Run):
    """Every record the run holds, times apart."""

    def lines(stream):
        for line in (run.path / f"{stream}.jsonl").read_text().splitlines():
            yield {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}

    return {stream: list(lines(stream)) for stream in ("steps", "updates", "evals")}


@pytest.mark.parametrize("source", [None, "old_policy", "rollout"])
def test_the_first_ratio_of_a_step_is_exactly_one(tmp_path, fresh, source, run, config):
    result = run(tmp_path / "run", fresh(), config(replay=ReplayConfig(source)))
    first = result.updates().query("update == 1")
    assert len(first) == STEPS
    for name in ("ratio/token_mean", "ratio/token_min", "ratio/token_max", "ratio/sequence_max"):
        assert first[name].tolist() == [1.0] * STEPS
    assert first["kl/k3"].tolist() == [0.0] * STEPS
    later = result.updates().query("update == 2")
    assert (later["ratio/token_std"] > 0).all()


def test_drift_is_exactly_zero_without_an_update(tmp_path, fresh, run, config):
    result = run(tmp_path / "run", fresh(), config(optim=OptimConfig(lr=0.0, minibatches=2, microbatch=3)))
    for name in ("drift/old", "drift/step", "drift/first", "drift/old_sets", "drift/old_tokens", "kl/k3"):
        assert result.steps()[name].tolist() == [0.0] * STEPS
    assert run(tmp_path / "moved", fresh(), config()).steps()["drift/old"].min() > 0


def test_drift_is_of_native_routing_on_response_rows(tmp_path, fresh, monkeypatch, run, config):
    """The logged number against one computed by hand from two plain recorded forwards."""
    from moe_rl.training import loop, sampler

    batches, before = [], []
    sample = sampler.sample_responses

    def spy(lm, *args, **kwargs):
        batch = sample(lm, *args, **kwargs)
        with torch.no_grad(), record_routing(lm.model) as recorder:
            lm.model(
                input_ids=batch.input_ids_BT,
                attention_mask=batch.attention_mask_BT,
                position_ids=batch.position_ids_BT,
            )
        batches.append(batch)
        before.append(recorder.trace())
        return batch

    monkeypatch.setattr(sampler, "sample_responses", spy)
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: None)
    lm = fresh()
    result = run(tmp_path / "run", lm, config(steps=1, replay=ReplayConfig("old_policy")))
    batch = batches[0]
    with torch.no_grad(), record_routing(lm.model) as recorder:
        lm.model(
            input_ids=batch.input_ids_BT,
            attention_mask=batch.attention_mask_BT,
            position_ids=batch.position_ids_BT,
        )
    old, new = before[0].experts, recorder.trace().experts
    changed = []
    for row in range(len(batch)):
        tokens = batch.response_mask_BT[row].nonzero().flatten().tolist()
        for t in range(tokens[0] - 1, tokens[-1]):  # rows prompt_len - 1 … end - 1
            changed += [
                [
                    1 - len({*a.tolist()} & {*b.tolist()}) / 2
                    for a, b in zip(old[row, t], new[row, t], strict=True)
                ]
            ]
    expected = torch.tensor(changed, dtype=torch.float64)
    record = result.steps().iloc[0]
    assert expected.mean() > 0
    assert record["drift/old"] == pytest.approx(expected.mean().item(), abs=1e-12)
    assert record["drift/old_by_layer"] == pytest.approx(expected.mean(0).tolist(), abs=1e-12)
    assert record["drift/old_tokens"] == pytest.approx(
        (expected > 0).any(1).double().mean().item(), abs=1e-12
    )


def test_a_replay_update_uses_the_old_experts_and_says_what_it_overrode(tmp_path, fresh, run, config):
    native = run(tmp_path / "native", fresh(), config())
    replayed = run(tmp_path / "replayed", fresh(), config(replay=ReplayConfig("old_policy")))
    first, second = replayed.updates().query("step == 1")["replay/overridden"]
    assert first == 0.0  # the router still agrees with π_old
    # the second update's forward overrode what had drifted after the first, on its own half of the rows
    assert 0 < second < 4 * replayed.updates()["drift/old"][0]
    assert "replay/overridden" not in native.steps()
    # the first update is the same in both arms, the second is not
    assert native.updates()["loss"][0] == replayed.updates()["loss"][0]
    assert native.updates()["ratio/token_std"][1] != replayed.updates()["ratio/token_std"][1]


def test_rollout_replay_forces_the_samplers_experts(tmp_path, fresh, monkeypatch, run, config):
    from moe_rl.training import groups, update

    recorded, forced = [], []
    sample, routing_of = groups.sample_and_grade, update.routing_of

    def sampled(*args, **kwargs):
        found = sample(*args, **kwargs)
        # as if the sampler were another engine: another first choice for every tenth token
        experts = found.trace.experts.clone()
        experts[:, ::10] = (experts[:, ::10] + 1) % found.trace.num_experts
        found = replace(found, trace=replace(found.trace, experts=experts))
        recorded.append(found.trace)
        return found

    def routed(old, rows):
        forced.append(routing_of(old, rows).trace)
        return routing_of(old, rows)

    monkeypatch.setattr(groups, "sample_and_grade", sampled)
    monkeypatch.setattr(update, "routing_of", routed)
    result = run(tmp_path / "run", fresh(), config(steps=1, replay=ReplayConfig("rollout")))
    assert torch.equal(torch.cat([trace.experts for trace in forced]), recorded[0].experts)
    # old and new log-probabilities are on the same experts, so the first ratio is 1 whatever the sampler did
    assert result.updates()["ratio/token_std"][0] == 0.0
    assert result.updates()["replay/overridden"][0] > 0
    assert 0.01 < result.steps()["mismatch/experts"][0] < 0.3


def test_rollout_replay_of_the_same_weights_is_old_policy_replay(tmp_path, fresh, run, config):
    """In float32 cached decoding chooses the experts of the full forward, so R2 and R3 coincide."""
    r2 = run(tmp_path / "r2", fresh(), config(replay=ReplayConfig("old_policy")))
    r3 = run(tmp_path / "r3", fresh(), config(replay=ReplayConfig("rollout")))
    assert r3.steps()["mismatch/experts"].tolist() == [0.0] * STEPS
    assert r3.steps()["loss"].tolist() == pytest.approx(r2.steps()["loss"].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("variant", "min_ratio"),
    [("response", None), ("threshold", 0.9), ("threshold", 1e-6), ("old_weights", None)],
)
def test_replay_variants_in_the_loop(tmp_path, fresh, variant, min_ratio, run, config):
    full = run(tmp_path / "full", fresh(), config(replay=ReplayConfig("old_policy"))).updates()
    options = ReplayConfig("old_policy", variant, min_ratio)
    other = run(tmp_path / "other", fresh(), config(replay=options)).updates()
    assert other["ratio/token_std"][0] == 0.0, "with weights unchanged every variant is the plain forward"
    assert full["replay/replaced"].tolist() == [0.0] * len(full)
    if min_ratio == 0.9:
        assert other["replay/replaced"].iloc[1:].max() > 0
    else:
        assert other["replay/replaced"].max() == 0.0
    if min_ratio == 1e-6:  # keeps every expert: the same as plain replay
        assert other["loss"].tolist() == full["loss"].tolist()
    else:
        assert other["loss"].tolist() != full["loss"].tolist()


def test_old_weights_leave_the_router_without_gradient(tmp_path, fresh, run, config):
    lm = fresh()
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    run(tmp_path / "run", lm, config(steps=1, replay=ReplayConfig("old_policy", "old_weights")))
    after = lm.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.endswith("mlp.gate.weight") for name in changed)


def test_arms_share_prompts_and_samples(tmp_path, fresh, run, config):
    """Before its first update every arm has seen the same: same prompts, same sampled responses."""
    runs = [
        run(tmp_path / "a", fresh(), config()),
        run(tmp_path / "b", fresh(), config(replay=ReplayConfig("old_policy"))),
        run(tmp_path / "c", fresh(), config(), objective="gspo"),
    ]
    for name in ("reward/mean", "response/length", "entropy", "load/max_violation", "mismatch/kl_k3"):
        assert len({r.steps()[name][0] for r in runs}) == 1
    assert len({r.evals()["eval/sampled"][0] for r in runs}) == 1
    assert len({r.steps()["loss"][1] for r in runs}) == 3
    other = run(tmp_path / "d", fresh(), config(seed=1))
    assert other.steps()["reward/mean"][0] != runs[0].steps()["reward/mean"][0]


def test_microbatches_do_not_change_the_update(tmp_path, fresh, run, config):
    whole = run(tmp_path / "whole", fresh(), config(steps=1)).updates()
    optim = replace(config().optim, microbatch=3)
    parts = run(tmp_path / "parts", fresh(), config(steps=1, optim=optim)).updates()
    for name in ("loss", "grad_norm", "kl/k3", "clip_frac/token", "ratio/token_std"):
        assert parts[name].tolist() == pytest.approx(whole[name].tolist(), rel=2e-3, abs=1e-6)


def test_learning_rate_warms_up_over_gradient_updates(tmp_path, fresh, run, config):
    result = run(
        tmp_path / "run", fresh(), config(optim=OptimConfig(lr=1e-3, minibatches=2, warmup_updates=4))
    )
    assert result.updates()["lr"].tolist() == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3] + [1e-3] * 5)


def test_kill_and_resume_equals_uninterrupted(tmp_path, fresh, monkeypatch, run, config):
    whole = run(tmp_path / "whole", fresh(), config())
    from moe_rl.training import loop

    count = 0
    real = loop.gradient_update

    def dies(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 6:  # in step 3, after the checkpoint of step 2 and an update past it
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "gradient_update", dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", fresh(), config())
    assert len(Run(tmp_path / "cut").updates()) == 5
    resumed = run(tmp_path / "cut", fresh(), config())
    assert untimed(resumed) == untimed(whole)
    events = [
        json.loads(line)["event"] for line in (tmp_path / "cut" / "events.jsonl").read_text().splitlines()
    ]
    assert "resumed" in events
    assert events.count("shares_prompts") == 1


def test_same_seed_same_numbers(tmp_path, fresh, run, config):
    first = run(tmp_path / "a", fresh(), config(steps=2))
    second = run(tmp_path / "b", fresh(), config(steps=2))
    assert untimed(first) == untimed(second)


def test_a_dense_model_trains_without_routing(tmp_path, dense_lm, run, config):
    steps = run(tmp_path / "run", dense_lm, config(steps=1)).steps()
    assert not [name for name in steps if name.startswith(("drift", "load", "replay"))]
    assert math.isfinite(steps["loss"][0])
    with pytest.raises(ValueError, match="no MoE layers"):
        run(tmp_path / "replay", dense_lm, config(replay=ReplayConfig("old_policy")))


def glossary():
    """Every metric name of the tables in the README and docs/objectives.md, `a/b_{c,d}` spelt out."""
    root = Path(__file__).resolve().parents[2]
    text = "".join((root / page).read_text(encoding="utf-8") for page in ("README.md", "docs/objectives.md"))
    for cell in re.findall(r"`([a-z_]+/[a-z_0-9{},|]+)`", text):
        stem, _, choices = cell.partition("{")
        yield from (stem + choice for choice in choices.rstrip("}").split(","))


def test_every_logged_metric_is_in_a_glossary(tmp_path, fresh, run, config):
    result = run(tmp_path / "run", fresh(), config(steps=1, replay=ReplayConfig("old_policy")))
    known = set(glossary())
    assert len(known) > 30
    logged = {name for frame in (result.steps(), result.updates(), result.evals()) for name in frame}
    assert len(logged) > 30
    for name in logged - {"step", "update", "eval/n", "lr"}:
        base = re.sub("_(sets|tokens|by_layer)$", "", name) if name.startswith("drift/") else name
        assert base in known or base in ("loss", "grad_norm", "grad_norm_max", "entropy"), name
