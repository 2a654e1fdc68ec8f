"""Epochs, frozen routers, precision, the sampler's own, query sets, lengths by step, snapshots."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_rl.training.border import check_model
from moe_rl.training.config import OptimConfig, RolloutConfig
from moe_rl.training.groups import first_prompt
from moe_rl.training.sampler import copy_in

SMALL = RolloutConfig(prompts=4, responses=4, max_new_tokens=6)


def test_epochs_repeat_the_updates_of_a_batch(tmp_path, fresh, run, config):
    optim = OptimConfig(lr=3e-3, minibatches=2, epochs=2, warmup_updates=8)
    updates = run(tmp_path / "moving", fresh(), config(steps=2, optim=optim)).updates()
    assert updates["update"].tolist() == [1, 2, 3, 4] * 2
    assert updates["lr"].tolist() == pytest.approx([3e-3 * n / 8 for n in range(1, 9)])
    # the first mini-batch a second time: three updates further from π_old
    assert updates["ratio/token_std"][0] == 0.0 and updates["ratio/token_std"][2] > 0
    assert (updates.query("update == 4")["drift/old"] > 0).all()

    still = run(tmp_path / "still", fresh(), config(steps=1, optim=replace(optim, lr=0.0))).updates()
    assert still["loss"][0] == still["loss"][2] and still["loss"][1] == still["loss"][3]


def test_frozen_routers_stay_and_the_rest_learns(tmp_path, lm, run, config):
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    frozen = OptimConfig(lr=3e-3, minibatches=2, warmup_updates=1, weight_decay=0.1, freeze_routers=True)
    steps = run(tmp_path, lm, config(optim=frozen)).steps()
    moved = {name for name, tensor in lm.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert not [name for name in moved if name.endswith("mlp.gate.weight")]
    assert {name for name in before if "experts" in name or "q_proj" in name} <= moved
    assert (steps["drift/old"] > 0).all()  # through the hidden states that the routers read


def test_a_dense_model_has_no_routers_to_freeze(dense_lm, config):
    with pytest.raises(ValueError, match="no routers to freeze"):
        check_model(dense_lm.model, None, config(optim=OptimConfig(freeze_routers=True)))


def test_the_sampler_has_numerics_of_its_own(tmp_path, fresh, run, config):
    plain = run(tmp_path / "plain", fresh(), config(steps=2)).steps()
    lm = fresh()
    rounded = replace(SMALL, sampler_dtype="bfloat16")
    steps = run(tmp_path / "rounded", lm, config(steps=2, rollout=rounded)).steps()
    assert (steps["mismatch/kl_k3"] > 100 * plain["mismatch/kl_k3"].abs()).all()
    assert lm.model.dtype == torch.float32
    weights = copy_in(lm, torch.bfloat16).model.state_dict()
    assert all(torch.equal(weights[name], t.bfloat16()) for name, t in lm.model.state_dict().items())


def test_training_in_bfloat16_keeps_what_is_exact(tmp_path, fresh, run, config):
    lm = fresh()
    steps = run(tmp_path / "half", lm, config(steps=2, precision="bfloat16")).steps()
    whole = run(tmp_path / "whole", fresh(), config(steps=2)).steps()
    assert lm.model.dtype == torch.float32
    assert (steps["mismatch/kl_k3"] > 100 * whole["mismatch/kl_k3"].abs()).all()  # decoding rounds, too
    assert (steps["drift/old"] > 0).all()
    still = OptimConfig(lr=0.0, minibatches=2)
    unmoved = run(tmp_path / "still", fresh(), config(steps=1, precision="bfloat16", optim=still))
    assert unmoved.updates()["ratio/token_max"].tolist() == [1.0, 1.0]
    assert unmoved.steps()["drift/old"].tolist() == [0.0]


def test_response_lengths_by_step(tmp_path, lm, run, config):
    schedule = replace(SMALL, max_new_tokens=2, length_schedule=[[4, 6], [2, 3]])
    assert [schedule.at(step).max_new_tokens for step in range(6)] == [2, 2, 3, 3, 6, 6]
    assert (schedule.longest, SMALL.longest) == (6, 6)
    steps = run(tmp_path, lm, config(rollout=schedule)).steps()
    # an untrained model rarely ends a response: most are as long as they may be
    assert steps["response/length"].le([2, 3, 3, 6]).all()
    assert steps["response/length"].diff()[[1, 3]].gt(0).all()


def test_query_sets_by_hand():
    config = replace(SMALL, query_set=8, query_set_steps=3)
    # sets of 8 prompts in batches of 4: two batches and the first again, then the next set
    assert [first_prompt(config, step) for step in range(1, 8)] == [0, 4, 0, 8, 12, 8, 16]
    forever = replace(config, query_set_steps=None)
    assert [first_prompt(forever, step) for step in range(1, 6)] == [0, 4, 0, 4, 0]
    assert [first_prompt(SMALL, step) for step in range(1, 4)] == [0, 4, 8]


def test_snapshots_stay_and_load(tmp_path, lm, run, config):
    result = run(tmp_path, lm, config(steps=4, snapshot_every=2))
    folders = sorted(path.name for path in (result.path / "snapshots").iterdir())
    assert folders == ["step_2", "step_4"]
    loaded = AutoModelForCausalLM.from_pretrained(result.path / "snapshots" / "step_4")
    assert all(torch.equal(loaded.state_dict()[name], t) for name, t in lm.model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_schedule": [[0, 8]]}, "length_schedule"),
        ({"length_schedule": [[4, 8, 9]]}, r"expected \[\[step, tokens\]"),
        ({"length_schedule": [[4, 8]], "overlong_cache": 2}, "overlong_cache"),
        ({"query_set": 6}, "multiple of rollout.prompts=4"),
        ({"query_set_steps": 3}, "needs a rollout.query_set"),
        ({"query_set": 8, "refill": 1}, "refill draws fresh prompts"),
        ({"sampler_dtype": "int8"}, "sampler_dtype='int8'"),
    ],
)
def test_contradictory_schedules_are_one_clear_line(options, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **options).check()
