"""The protocol measures what the loop does, and its tables add up."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from small_moe import SMALL, OnesReward

from moe_rl.laboratory import protocol
from moe_rl.laboratory.observe import RoutedPass, observe
from moe_rl.laboratory.offline import compare_traces
from moe_rl.laboratory.protocol import DriftOptions, measure, phases, prompt_rows
from moe_rl.laboratory.two_causes import two_causes
from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.routing import RoutingError, RoutingTrace, expert_change
from moe_rl.store import RunStore
from moe_rl.tasks import get_task
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import EvaluationConfig, OptimConfig, RolloutConfig, TrainConfig
from moe_rl.training.loop import train

torch.set_num_threads(1)
CONFIG = TrainConfig(
    steps=1,
    rollout=RolloutConfig(prompts=4, responses=4, max_new_tokens=6),
    optim=OptimConfig(lr=3e-3, minibatches=2, warmup_updates=0),
    evaluation=EvaluationConfig(every=2, prompts=2),
)
QUICK = DriftOptions(floor=False, reasons=False, resamples=20)


def ones():
    return OnesReward(get_task("sort", min_length=3, max_length=5))


@pytest.fixture
def lm():
    return load_model(ModelConfig(name="small", config=SMALL), get_task("sort").default_tokenizer)


def measured(lm, config=CONFIG, options=QUICK):
    told = []
    found = measure(lm, ones(), get_objective("grpo"), config, options, told.append)
    assert len(told) == phases(config, options)
    return found


def frame(found, name):
    return pd.DataFrame(found.tables[name])


def one(table, **equal):
    for key, value in equal.items():
        table = table[table[key] == value]
    (row,) = table.to_dict("records")
    return row


def test_unchanged_weights_have_no_drift_at_all(lm):
    """A learning rate of 0: everything that says how far the policy moved is exactly 0."""
    found = measured(lm, replace(CONFIG, optim=replace(CONFIG.optim, lr=0.0)), replace(QUICK, reasons=True))
    drift = frame(found, "drift")
    still = drift[drift["metric"] != "router_shift"]
    assert len(still) > 20 and (still["sum"] == 0).all()
    assert (drift.loc[drift["metric"] == "router_shift", "value"] == 1).all()
    updates = frame(found, "updates").query(
        "metric in ('kl_k1', 'kl_k3', 'log_ratio_sq', 'relative_update_norm')"
    )
    assert len(updates) == 8 and (updates["value"] == 0).all()
    assert (frame(found, "attribution")["sum"] == 0).all()
    assert (frame(found, "margins")["sum"] == 0).all()


def test_the_tables_are_of_the_traces_it_keeps(lm):
    """Drift after each update, from the saved traces by the other implementation; both row masks; offline."""
    found = measured(lm)
    drift = frame(found, "drift").query("by == 'all'")
    S = found.summary["prompt_tokens"]
    T = found.traces["old"].valid.shape[1]
    response_BT = (torch.arange(T) >= S - 1).expand(len(found.traces["old"].valid), T)
    for number in (1, 2):
        old, new = found.traces["old"], found.traces[f"update-{number}"]
        for rows, mask_BT in (("response", response_BT), ("prompt", ~response_BT)):
            change = expert_change(old.where(mask_BT), new.where(mask_BT))
            row = one(drift, subject=str(number), rows=rows, metric="experts")
            assert row["sum"] == int(change.changed_experts.sum())
            assert row["count"] == change.num_tokens * change.top_k * len(change.layer_ids)
            assert row["value"] == pytest.approx(change.experts, abs=1e-12)
            assert row["low"] <= row["value"] <= row["high"]
        offline = pd.DataFrame(compare_traces(old, new, 20, prompt_tokens=S).tables["drift"])
        for _, row in offline[offline["by"] != "position"].iterrows():
            live = frame(found, "drift")
            same = one(live, subject=str(number), **row[["rows", "metric", "by", "at"]].to_dict())
            assert (same["sum"], same["count"]) == (row["sum"], row["count"])
    assert found.summary["experts_changed_last"] > found.summary["experts_changed_first"] > 0.01
    tokens = one(drift, subject="1", rows="response", metric="tokens")
    assert tokens["count"] == found.summary["response_tokens"]


@pytest.mark.parametrize("steps", [1, 2])
def test_it_takes_the_updates_of_the_training_loop(lm, tmp_path, steps):
    """The same weights as `train` ends with: measuring changes nothing, earlier batches are trained on."""
    start = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    config = replace(CONFIG, steps=steps)
    measured(lm, config, DriftOptions(floor=steps == 1, reasons=steps == 1, resamples=5))
    after = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    lm.model.load_state_dict(start)
    with RunStore.open(tmp_path, {"seed": 0}) as store:
        train(lm, ones(), get_objective("grpo"), config, store)
    assert not torch.equal(after["lm_head.weight"], start["lm_head.weight"])
    for name, tensor in lm.model.state_dict().items():
        assert torch.equal(tensor, after[name]), name


def test_under_autocast_the_new_weights_are_the_ones_that_are_measured(lm, monkeypatch):
    """Autocast would go on with the old weights it has cast; and its own floor is 0 there as well."""
    seen = []

    def spied(model, batch, plan, temperature, **options):
        seen.append((batch, plan))
        return observe(model, batch, plan, temperature, **options)

    monkeypatch.setattr(protocol, "observe", spied)
    config = replace(CONFIG, optim=replace(CONFIG.optim, minibatches=1, lr=1e-2))
    found = measured(lm, config, DriftOptions(reasons=False, precision="bfloat16", resamples=5))
    assert found.summary["experts_changed_last"] > 0.02
    floor = frame(found, "floor").query("by == 'all' and metric == 'experts'")
    assert one(floor, subject="repeated", rows="response")["sum"] == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = observe(lm.model, *seen[-1], 1.0)
    kept = found.traces["update-1"]
    assert torch.equal(again.trace.experts[kept.valid], kept.experts[kept.valid])


def test_prompt_rows_and_response_rows_share_none():
    ids = torch.tensor([[0, 5, 6, 7, 8, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 0]])
    response = torch.tensor([[0.0, 0, 0, 1, 1, 0]])
    batch = RolloutBatch(ids, attention, response, torch.zeros(1, 6), torch.ones(1, dtype=torch.bool), 3)
    assert prompt_rows(batch).tolist() == [[False, True, False, False, False, False]]
    assert batch.routing_rows_BT.tolist() == [[False, False, True, True, False, False]]


def test_two_causes_by_hand():
    """Two response tokens: staleness 0.3 and -0.1, mismatch 0.1 and 0.2, an expert of two changed by each."""

    def trace(*experts):
        return RoutingTrace(torch.tensor([experts])[:, :, None], torch.ones(1, 3, dtype=torch.bool), (0,), 4)

    mask = torch.tensor([[0.0, 1, 1]])
    sampler_logp = torch.tensor([[0.0, -1.0, -2.0]], dtype=torch.float64)
    batch = RolloutBatch(
        torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long), mask, sampler_logp,
        torch.ones(1, dtype=torch.bool), 1,
    )  # fmt: skip
    old = RoutedPass(trace((0, 1), (0, 1), (0, 1)), sampler_logp + torch.tensor([[0.0, 0.1, 0.2]]))
    new = RoutedPass(trace((0, 2), (0, 1), (0, 1)), old.logp_BT + torch.tensor([[0.0, 0.3, -0.1]]))
    sampler = trace((0, 1), (1, 3), (0, 1))
    table = pd.DataFrame(two_causes(new, old, sampler, batch, torch.zeros(1), 5, "1"))

    def value(metric, at):
        return one(table, metric=metric, at=at)["value"]

    assert value("experts", "staleness") == value("experts", "mismatch") == 0.25
    assert value("experts", "both") == 0.5
    assert value("mean_square", "staleness") == pytest.approx((0.09 + 0.01) / 2)
    assert value("mean_square", "mismatch") == pytest.approx((0.01 + 0.04) / 2)
    assert value("mean_square", "product") == pytest.approx(2 * (0.03 - 0.02) / 2)
    assert value("mean_square", "both") == pytest.approx((0.16 + 0.01) / 2)
    assert value("share", "staleness") == pytest.approx((0.3 * 0.4 - 0.1 * 0.1) / 0.17)
    assert value("share", "mismatch") == pytest.approx((0.1 * 0.4 + 0.2 * 0.1) / 0.17)


def test_what_cannot_be_measured_is_said(lm):
    class Zeros(OnesReward):
        def reward(self, problem, text):
            return 0.0

    with pytest.raises(ValueError, match="rewards of every group are equal"):
        measure(lm, Zeros(get_task("sort", min_length=3, max_length=5)), get_objective("grpo"), CONFIG, QUICK)
    with pytest.raises(ValueError, match="refill"):
        measured(lm, replace(CONFIG, rollout=replace(CONFIG.rollout, refill=1)))
    with pytest.raises(ValueError, match="precision"):
        measured(lm, options=DriftOptions(precision="float16"))
    dense = {
        k: v
        for k, v in SMALL.items()
        if "expert" not in k and k not in ("norm_topk_prob", "moe_intermediate_size")
    }
    dense_lm = load_model(
        ModelConfig(name="dense", architecture="qwen3", config=dense), get_task("sort").default_tokenizer
    )
    with pytest.raises(ValueError, match="no MoE layers"):
        measured(dense_lm)


def test_traces_that_cannot_be_compared_are_refused():
    def trace(B=2, T=3, token=1):
        experts = torch.tensor([0, 1]).expand(B, T, 1, 2)
        ids = torch.full((B, T), token)
        return RoutingTrace(experts, torch.ones(B, T, dtype=torch.bool), (0,), 4).for_tokens(ids)

    assert compare_traces(trace(), trace(T=2), 5).summary["experts_changed_first"] == 0
    with pytest.raises(RoutingError, match="different tokens"):
        compare_traces(trace(), trace(token=2), 5)
    with pytest.raises(RoutingError, match="prompt_tokens=9"):
        compare_traces(trace(), trace(), 5, prompt_tokens=9)
    with pytest.raises(RoutingError):
        compare_traces(trace(), trace(B=1), 5)
