"""RoutingReplayGRPOTrainer under TRL's own options: what it replays, records, measures and refuses."""

import copy
import logging
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt -e '.[trl]'")
from peft import LoraConfig
from trainers import GROUP, fixed_rollout, history
from trl import GRPOTrainer

from moe_rl.integrations.carried import OLD, sequences, take_trace
from moe_rl.integrations.pool import batch_metrics
from moe_rl.integrations.trl import RoutingReplayGRPOTrainer
from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.routing import RoutingError, record_routing

OFF_POLICY = {"rollout_func": fixed_rollout, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 3}
COMPARED = ("loss", "grad_norm", "drift/old", "clip_frac/token", "ratio/token_log_sq", "kl/k1")


def trained(trainer):
    trainer.train()
    return history(trainer)


def column(entries, name):
    return [entry[name] for entry in entries]


class Watched(RoutingReplayGRPOTrainer):
    """Keeps the batches as TRL has shuffled and split them, and every loss pass."""

    def __init__(self, *arguments, **options):
        self.rollouts, self.passes = [], []
        super().__init__(*arguments, **options)

    def _prepare_inputs(self, batch):
        inputs = super()._prepare_inputs(batch)
        if not any(self._buffered_inputs is seen for seen in self.rollouts):
            self.rollouts.append(self._buffered_inputs)
        return inputs

    def observe(self, seen):
        self.passes.append(seen)
        super().observe(seen)


def test_without_replay_the_numbers_are_trls(trainer):
    """Recording and measuring change no bit of TRL's own training; our counts equal TRL's."""
    plain = trained(trainer(cls=GRPOTrainer, **OFF_POLICY))
    ours = trained(trainer(**OFF_POLICY))
    for name in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean"):
        assert column(ours, name) == column(plain, name)
    assert column(ours, "clip_frac/token") == pytest.approx(column(plain, "clip_ratio/region_mean"), abs=1e-6)
    drift = column(ours, "drift/old")
    assert drift[0] == 0 and min(drift[1:]) > 0


def test_replay_is_the_same_under_checkpointing_and_accumulation(trainer):
    plain = {"gradient_checkpointing": False}
    expected = trained(trainer(replay="old_policy", **plain, **OFF_POLICY))
    native = trained(trainer(**plain, **OFF_POLICY))
    assert abs(native[1]["loss"] - expected[1]["loss"]) > 1e-3  # the replay was there
    accumulated = {"rows": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    reentrant = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    for options in ({}, reentrant, accumulated):  # {}: TRL's default, checkpointing that is not reentrant
        found = trained(trainer(replay="old_policy", **OFF_POLICY | options))
        for name in COMPARED:
            assert column(found, name) == pytest.approx(column(expected, name), rel=1e-4, abs=1e-6), name


def test_nothing_is_recorded_unasked(trainer):
    built = trainer(cls=Watched, drift=False, **OFF_POLICY | {"max_steps": 1})
    (entry,) = trained(built)
    assert not any(name.startswith(("drift/", "replay/")) for name in entry)
    assert "clip_frac/token" in entry and f"{OLD}_experts" not in built.rollouts[0][0]


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_objectives_add_up_over_micro_batches(trainer, name):
    """Token means and response means of an optimiser step, whole and in two micro-batches."""
    options = OFF_POLICY | {"num_iterations": 1, "max_steps": 3}
    whole = trained(trainer(objective=get_objective(name), **options))
    parts = {"rows": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    split = trained(trainer(objective=get_objective(name), **options | parts))
    for key in COMPARED:
        assert column(split, key) == pytest.approx(column(whole, key), rel=1e-4, abs=1e-6), key


def test_steps_that_span_rollouts_divide_by_their_rollouts_mean(trainer):
    """Three micro-batches a rollout, two an optimiser step: the second step takes one of either rollout."""
    divisors = []

    class Counted(RoutingReplayGRPOTrainer):
        def _tokens_of_step(self):
            tokens = super()._tokens_of_step()
            counts = [int(part["completion_mask"].sum()) for part in self._buffered_inputs]
            divisors.append((tokens, 2 / 3 * sum(counts)))
            return tokens

    options = {"rollout_func": fixed_rollout, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    trainer(cls=Counted, objective=get_objective("dapo"), max_steps=3, **options).train()
    assert len(divisors) == 6 and len({expected for _, expected in divisors}) == 2
    for tokens, expected in divisors:
        assert tokens == pytest.approx(expected)


def test_rows_follow_their_samples(trainer, scene):
    """Shuffled and split, every row's trace is what the model chooses on that row's tokens alone."""
    built = trainer(cls=Watched, replay="old_policy", rows=2, rollout_func=fixed_rollout,
                    steps_per_generation=4, max_steps=1)  # fmt: skip
    built.train()
    model, rows = scene.fresh(), 0
    unshuffled = fixed_rollout([p for p in scene.prompts[:2] for _ in range(GROUP)], built)["completion_ids"]
    order = []
    for batch in built.rollouts[0]:
        ids, mask = sequences(batch)
        trace = take_trace(batch, OLD, built._layout)
        for row in range(len(ids)):
            real = mask[row].bool()
            with torch.no_grad(), record_routing(model) as recorder:
                model(input_ids=ids[row : row + 1, real])
            assert torch.equal(trace.experts[row, real].long(), recorder.trace().experts[0].long())
            assert torch.equal(trace.valid[row], real)
            completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
            order.append(unshuffled.index(completion))
            rows += 1
    assert rows == 8 and sorted(order) == list(range(8)) and order != list(range(8))


def test_a_trace_of_other_rows_is_refused(trainer):
    class Mixed(RoutingReplayGRPOTrainer):
        def _prepare_inputs(self, batch):
            inputs = dict(super()._prepare_inputs(batch))
            for part in ("experts", "valid", "tokens"):
                inputs[f"{OLD}_{part}"] = inputs[f"{OLD}_{part}"].flip(0)
            return inputs

    with pytest.raises(RoutingError, match="other tokens"):
        trainer(cls=Mixed, replay="old_policy", **OFF_POLICY).train()


def test_a_replay_that_reaches_no_layer_is_an_error(trainer):
    class Elsewhere(RoutingReplayGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, *arguments, **options):
            if self._until_backward is not None and not self._rollout.pass_due:
                model = copy.deepcopy(self.model)
            return super()._get_per_token_logps_and_entropies(model, *arguments, **options)

    with pytest.raises(RoutingError, match=r"no complete forward|reached"):
        trainer(cls=Elsewhere, replay="old_policy", **OFF_POLICY).train()


def test_the_pass_that_trl_leaves_out_is_run(trainer):
    """TRL's on-policy default scores no old policy; its routing is recorded all the same, and replayed."""
    built = trainer(cls=Watched, replay="old_policy", rows=8, rollout_func=fixed_rollout, max_steps=2)
    entries = trained(built)
    assert "old_per_token_logps" not in built.rollouts[0][0]
    assert f"{OLD}_experts" in built.rollouts[0][0]
    assert column(entries, "drift/old") == [0, 0]
    assert column(entries, "ratio/token_log_sq") == [0, 0]
    plain = trained(trainer(cls=GRPOTrainer, rows=8, rollout_func=fixed_rollout, max_steps=2))
    assert column(entries, "loss") == pytest.approx(column(plain, "loss"), abs=1e-6)
    assert column(entries, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-5)


def test_metrics_are_those_of_one_call_on_all_rows(trainer):
    """Micro-batches of different lengths and two optimiser steps a log, reduced by sums and counts."""
    objective = get_objective("gspo", clip_low=0.1, clip_high=0.1)
    options = {"rows": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "logging_steps": 2}
    options |= {"rollout_func": fixed_rollout, "max_steps": 2}
    built = trainer(cls=Watched, objective=objective, replay="old_policy", **options)
    (entry,) = trained(built)
    assert len(built.passes) == 4
    width = max(p.rows["mask_BT"].shape[1] for p in built.passes)
    rows = {
        name: torch.cat([
            p.rows[name] if p.rows[name].dim() == 1
            else torch.nn.functional.pad(p.rows[name], (0, width - p.rows[name].shape[1]))
            for p in built.passes
        ])
        for name in built.passes[0].rows
    }  # fmt: skip
    for name, value in batch_metrics(objective, rows).items():
        assert entry[name] == pytest.approx(value, rel=1e-6), name
    changes = [p.changes["drift/old"] for p in built.passes]
    changed, slots = sum(int(c.changed_experts.sum()) for c in changes), sum(c.num_tokens for c in changes)
    assert slots == int(rows["mask_BT"].sum())
    assert entry["drift/old"] == pytest.approx(changed / (slots * 2 * 2))  # L = K = 2
    assert entry["clip_frac/sequence"] > 0


@pytest.mark.parametrize("replay", ["old_policy", "rollout"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_reference_pass_is_native(trainer, scene, replay, on_policy):
    """With LoRA the reference is the policy with its adapter off: TRL scores it on the same module."""
    options = {"max_steps": 1} if on_policy else {"max_steps": 2, "steps_per_generation": 2}
    built = trainer(cls=Watched, replay=replay, beta=0.1, rows=8 if on_policy else 4,
                    peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]), **options)  # fmt: skip
    before = {n: p.clone() for n, p in built.model.named_parameters() if p.requires_grad}
    entries = trained(built)
    assert all("kl" in entry for entry in entries)
    batch, base = built.rollouts[0][0], scene.fresh()
    ids, mask = sequences(batch)
    C = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = base(input_ids=ids, attention_mask=mask).logits[:, -C - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    counted = batch["completion_mask"].bool()
    assert torch.allclose(batch["ref_per_token_logps"][counted], expected[counted], atol=1e-5)
    assert any(not torch.equal(before[n], p) for n, p in built.model.named_parameters() if n in before)


def test_aux_loss_only_when_asked(trainer, scene, caplog):
    one, model = OFF_POLICY | {"max_steps": 1}, scene.fresh()
    model.config.router_aux_loss_coef = 0.5
    with caplog.at_level(logging.WARNING, "moe_rl.integrations.trl"):
        off = trained(trainer(copy.deepcopy(model), **one))
    assert "router_aux_loss_coef=0.5" in caplog.text
    assert "aux_loss" not in off[0]
    clean = trained(trainer(cls=GRPOTrainer, router_aux_loss_coef=0.0, **one))
    assert column(off, "loss") == column(clean, "loss")
    on = trained(trainer(copy.deepcopy(model), router_aux_loss_coef=0.5, **one))
    assert on[0]["loss"] == pytest.approx(off[0]["loss"] + 0.5 * on[0]["aux_loss"], rel=1e-4)
    ours = {"objective": get_objective("grpo"), "router_aux_loss_coef": 0.5}
    again = trained(trainer(copy.deepcopy(model), **ours, **one))
    assert again[0]["loss"] == pytest.approx(on[0]["loss"], rel=1e-4)


def test_advantages_by_our_convention(trainer):
    built = trainer(cls=Watched, advantages="paper", **OFF_POLICY)
    built.train()
    scaled = trainer(cls=Watched, **OFF_POLICY)
    scaled.train()
    ours = torch.cat([batch["advantages"] for batch in built.rollouts[0]])
    trls = torch.cat([batch["advantages"] for batch in scaled.rollouts[0]])
    assert torch.allclose(ours, trls, rtol=2e-3) and not torch.equal(ours, trls)
    assert ours.abs().max() > trls.abs().max()  # TRL adds 1e-4 to the standard deviation


def test_a_completion_without_a_reward_is_no_zero(trainer):
    built = trainer(advantages="paper", **OFF_POLICY)
    built.reward_funcs = [lambda completion_ids, **_: [None, *[1.0] * (len(completion_ids) - 1)]]
    with pytest.raises(ValueError, match="1 completions got None or NaN from every reward function"):
        built.train()


REFUSED = [
    ({"replay": "r2"}, "expected one of"),
    ({"advantages": "batch"}, "expected None or one of"),
    ({"objective": get_objective("ppo")}, "needs old_values_BT"),
    ({"objective": get_objective("rspo")}, "needs router_shift_BT"),
    ({"objective": get_objective("dpo")}, "compares neighbouring"),
    ({"objective": get_objective("grpo", kl_coef=0.1)}, "kl_coef=0.1"),
    ({"objective": get_objective("grpo"), "entropy_coef": 0.1, "delta": 2.0}, "entropy_coef=0.1.*delta=2.0"),
    ({"replay": "rollout", "use_transformers_continuous_batching": True}, "continuous_batching"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refused(trainer, options, reason):
    with pytest.raises(ValueError, match=reason):
        trainer(**options)


def test_a_dense_model_is_refused(trainer, scene):
    fields = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    config = ModelConfig(name="dense", architecture="qwen3", config=fields)
    with pytest.raises(RoutingError):
        trainer(load_model(config, scene.task.default_tokenizer).model, replay="old_policy")


def test_resuming_restores_the_experts(trainer, tmp_path):
    """transformers' own resumption leaves fused experts as they are, with a warning."""
    first = trainer(replay="old_policy", save_strategy="steps", save_steps=1, save_only_model=True)
    first.train()
    saved = Path(first.args.output_dir) / "checkpoint-1"
    whole = type(first.model).from_pretrained(saved).state_dict()
    again = trainer(replay="old_policy")
    before = again.model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].clone()
    again._load_from_checkpoint(str(saved))
    loaded = again.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())
    assert not torch.equal(loaded["model.layers.0.mlp.experts.gate_up_proj"], before)


def test_the_name_of_an_objective_is_no_objective(trainer):
    with pytest.raises(ValueError, match="objective='gspo': expected get_objective"):
        trainer(objective="gspo")


def test_the_ten_lines_of_the_docs(scene, tmp_path, monkeypatch):
    scene.lm.save(tmp_path / "model")
    text = (Path(__file__).resolve().parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    names = {}
    here = (
        "max_steps=4, learning_rate=3e-3, max_completion_length=6, use_cpu=True, bf16=False, report_to=[], "
    )
    here += "logging_steps=1, save_strategy='no'"
    exec(code.replace("DIR", str(tmp_path / "model")).replace("max_steps=8", here), names)
    entries = history(names["trainer"])
    assert len(entries) == 4 and max(entry["replay/overridden"] for entry in entries) > 0
