"""`rollout.ahead`: responses that two versions of the weights have drawn."""

import json
import math
from dataclasses import replace

import pytest
import torch

from moe_rl.routing import record_routing
from moe_rl.store import Run
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.ahead import ahead_tensors, restore_ahead
from moe_rl.training.config import ReplayConfig, RolloutConfig
from moe_rl.training.policy import score
from moe_rl.training.sampler import Sampler
from moe_rl.training.seeds import random_stream

N = 3
ROLLOUT = RolloutConfig(prompts=4, responses=4, max_new_tokens=6, ahead=N)


def move(model):
    """Other weights, as after an update."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))


def prompts_of(lm, task):
    return [prompt_ids(lm.tokenizer, task.train(row // 4)) for row in range(16)]


@pytest.mark.parametrize(("share", "microbatch"), [(False, None), (True, None), (False, 6)])
def test_every_token_has_its_own_samplers_log_probability_and_version(
    lm, task, monkeypatch, share, microbatch
):
    monkeypatch.setattr("moe_rl.training.rollout.WORTH_READING_ONCE", 0)
    config = replace(ROLLOUT, microbatch=microbatch)
    before = Sampler(lm, config, version=4, record=True, share_prompts=share)
    with random_stream("test"):
        ahead = before.start(prompts_of(lm, task), N)
    assert 0 < ahead.batch.finished_B.sum() < 16, "this test needs responses that end early, and others"
    with torch.no_grad(), record_routing(lm.model) as recorder:
        old_part = score(lm.model, ahead.batch, 1.0).logp_BT
    old_experts = recorder.trace().experts
    move(lm.model)
    with random_stream("test"):
        sampled = replace(before, version=5).go_on(ahead, 6 - N)
    batch, S = sampled.batch, ahead.batch.prompt_length
    with torch.no_grad(), record_routing(lm.model) as recorder:
        new = score(lm.model, batch, 1.0).logp_BT
    new_experts = recorder.trace().experts

    on = batch.response_mask_BT > 0
    older = on.clone()
    older[:, S + N :] = False
    assert torch.equal(batch.version_BT, torch.where(on, torch.where(older, 4, 5), -1))
    assert torch.equal(batch.turn_BT, torch.where(on, 0, -1))
    assert torch.equal(batch.input_ids_BT[:, : S + N], ahead.batch.input_ids_BT)
    expected = new.clone()
    expected[:, : S + N] = old_part
    assert torch.allclose(batch.sampler_logp_BT[on], expected[on], atol=2e-5)
    assert (new - expected)[older].abs().max() > 1e-2, "the older weights are others"
    ended = ahead.batch.finished_B
    assert batch.finished_B[ended].all() and not on[ended][:, S + N :].any()
    assert batch.responses()[int(ended.nonzero()[0])][-1] == lm.stop_ids[0]

    # a row routes the token of its column and scores the next: the last of the older rows is S + N - 2
    trace = sampled.trace
    last = S + N - 1
    assert trace.weights_version is None
    assert set(trace.row_versions[:, :last][trace.valid[:, :last]].tolist()) == {4}
    assert set(trace.row_versions[:, last:][trace.valid[:, last:]].tolist()) == {5}
    assert set(trace.row_versions[~trace.valid].tolist()) <= {-1}
    scoring = batch.routing_rows_BT
    assert trace.valid[scoring].all()
    for columns, experts in ((slice(0, last), old_experts), (slice(last, None), new_experts)):
        rows = scoring[:, columns][:, : experts[:, columns].shape[1]]
        found = trace.experts[:, columns][:, : rows.shape[1]][rows].sort(-1).values
        assert torch.equal(found.long(), experts[:, columns][rows].long().sort(-1).values)


def test_with_the_same_weights_a_response_in_two_parts_is_the_response(lm, task):
    sampler = Sampler(lm, replace(ROLLOUT, temperature=0), version=0, record=True)
    whole = sampler.start(prompts_of(lm, task), 6)
    parts = sampler.go_on(sampler.start(prompts_of(lm, task), N), 6 - N)
    assert torch.equal(parts.batch.input_ids_BT, whole.batch.input_ids_BT)
    assert torch.equal(parts.batch.finished_B, whole.batch.finished_B)
    for name in ("sampler_logp_BT", "sampler_entropy_BT"):
        ours, theirs = getattr(parts.batch, name), getattr(whole.batch, name)
        assert torch.allclose(ours, theirs, atol=2e-5)
    rows = whole.batch.routing_rows_BT
    assert torch.equal(parts.trace.experts[rows], whole.trace.experts[rows])
    assert parts.trace.weights_version == 0 and parts.trace.row_versions is None


def test_what_all_have_ended_is_not_sampled_again(lm, task):
    sampler = Sampler(lm, ROLLOUT, version=0, record=True)
    with random_stream("test"):
        ahead = sampler.start(prompts_of(lm, task), N)
    ended = replace(ahead, batch=ahead.batch.ended(torch.arange(16)))
    found = replace(sampler, version=1).go_on(ended, 3)
    assert torch.equal(found.batch.input_ids_BT, ahead.batch.input_ids_BT)
    assert set(found.trace.row_versions[found.trace.valid].tolist()) == {0}


def test_a_checkpoint_keeps_what_was_sampled_ahead(lm, task):
    with random_stream("test"):
        ahead = Sampler(lm, ROLLOUT, version=7, record=True).start(prompts_of(lm, task), N)
    again = restore_ahead(ahead_tensors(ahead) | {"policy.x|step": torch.zeros(1)}, torch.device("cpu"))
    assert again.batch.prompt_length == ahead.batch.prompt_length
    for name, tensor in ahead.batch.tensors().items():
        assert torch.equal(getattr(again.batch, name), tensor)
    assert torch.equal(again.trace.experts, ahead.trace.experts)
    assert (again.trace.weights_version, again.trace.layer_ids) == (7, ahead.trace.layer_ids)
    assert ahead_tensors(None) == {} and restore_ahead({}, torch.device("cpu")) is None


def records(run):
    lines = (run.path / "steps.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def test_kill_and_resume_equals_uninterrupted(tmp_path, fresh, monkeypatch, run, config):
    from moe_rl.training import loop

    options = config(rollout=ROLLOUT, replay=ReplayConfig("rollout"), drift_every=0)
    whole = run(tmp_path / "whole", fresh(), options)
    real = loop.old_policy

    def dies(learner, groups, plan, step):
        if step == 3:
            raise KeyboardInterrupt
        return real(learner, groups, plan, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "old_policy", dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", fresh(), options)
    assert len(Run(tmp_path / "cut").steps()) == 2
    assert records(run(tmp_path / "cut", fresh(), options)) == records(whole)


def test_what_the_loop_logs_of_two_versions(tmp_path, fresh, run, config):
    steps = run(tmp_path / "on", fresh(), config(steps=3, drift_every=0, rollout=ROLLOUT)).steps()
    assert steps["rollout/older_tokens"][0] == 0.0, "nothing was sampled before the first step"
    assert steps["rollout/older_tokens"][1:].between(0.5, 0.9).all()  # three tokens of up to six
    assert math.isnan(steps["mismatch/kl_k3_older"].iloc[0])  # a first step has no older tokens
    assert (steps["mismatch/kl_k3_older"][1:] > 1e-4).all()  # the updates of a step
    assert steps["mismatch/kl_k3_current"].abs().max() < 1e-8  # rounding
    # recomputed, the first ratio is 1 all the same; with the samplers' own it has the older weights in it
    options = config(steps=2, drift_every=0, rollout=replace(ROLLOUT, recompute=False))
    trusted = run(tmp_path / "own", fresh(), options)
    first = trusted.updates().query("update == 1")
    assert first["ratio/token_std"].iloc[0] < 2e-5 < 1e-3 < first["ratio/token_std"].iloc[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ahead": 6}, r"ahead=6: expected 0 \(off\) to 5"),
        ({"ahead": 2, "length_schedule": [[3, 2]]}, r"ahead=2: expected 0 \(off\) to 1"),
        ({"refill": 1}, "not with rollout.ahead"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(ROLLOUT, **options).check()
