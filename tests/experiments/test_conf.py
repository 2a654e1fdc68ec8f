"""Every file under conf/ composes, and what it composes to can be built."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.config import arm_name, build_objective, build_task, register, run_id, train_config
from experiments.cost_config import register_cost
from experiments.drift_config import register_drift
from experiments.launch import CONF
from experiments.noise_config import register_noise

GROUPS = sorted(p.relative_to(CONF) for p in Path(CONF).glob("*/*.yaml") if p.parent.name != "accelerate")
NEEDS = {  # what a group's file leaves to the user
    "task/jsonl": ["task.path=problems.jsonl"],
    "task/reasoning_gym": ["task.family=chain_sum"],
    "model/checkpoint": ["model.path=checkpoint"],
    "model/upcycled": ["model.path=checkpoint"],
    "experiment/recovery": ["model.path=checkpoint"],
    "experiment/qwen3_30b_a3b": ["task.path=problems.jsonl", "device=cpu"],
}
OTHERS = {  # commands with options of their own
    "experiment/noise": "measure_noise",
    "experiment/cost": "measure_cost",
}


def composed(*overrides, config="config"):
    register()
    register_drift()
    register_noise()
    register_cost()
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose(config, overrides=list(overrides))


def test_there_is_something_to_compose():
    assert len(GROUPS) > 20


@pytest.mark.parametrize("path", GROUPS, ids=str)
def test_every_file_composes(path):
    group, name = path.parts[0], path.stem
    if name == "ray":
        pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")
    of = "measure_drift" if name.startswith("drift_") else OTHERS.get(f"{group}/{name}", "config")
    needs = NEEDS.get(f"{group}/{name}", [])
    cfg = composed(f"{group}={name}", *needs, config=of)
    config = train_config(cfg)
    build_objective(cfg)
    if cfg.task.name not in ("jsonl", "reasoning_gym"):  # these read a file, need an extra
        build_task(cfg)
    if group == "experiment":
        assert config.experiment == name, "an experiment's runs go to the folder of its name"
    if group in ("task", "objective"):
        assert cfg[group].name == name


def test_the_defaults_are_the_papers():
    assert build_objective(composed("objective=grpo")).clip_low == 0.2
    assert build_objective(composed("objective=grpo")).clip_high == 0.27
    assert build_objective(composed("objective=gspo")).clip_low == 3e-4
    assert build_objective(composed("objective=gspo")).clip_high == 4e-4
    assert composed().optim.minibatches == 4


def test_advantages_follow_the_objectives_paper():
    assert composed("objective=dr_grpo").advantages == composed("objective=minirl").advantages == "mean"
    assert composed("objective=gspo").advantages == "paper"
    assert composed("objective=dr_grpo", "advantages=trl").advantages == "trl"


def test_a_checkpoint_starts_as_it_is():
    assert composed("model=checkpoint", "model.path=x").cold_start.enabled is False
    assert composed("model=checkpoint", "model.path=x", "cold_start.enabled=true").cold_start.enabled is True


def test_arms():
    names = [arm_name("grpo", source) for source in (None, "old_policy", "rollout")]
    assert names == ["grpo", "grpo+replay", "grpo+rollout_replay"]
    cfg = composed("arm=grpo_replay")
    assert (cfg.arm, cfg.objective.name, cfg.replay.source) == ("grpo+replay", "grpo", "old_policy")


def test_run_id_names_everything_but_the_seed_and_the_folder():
    base = run_id(composed())
    assert run_id(composed("seed=7")) == base
    assert run_id(composed("output=elsewhere")) == base
    assert run_id(composed("launcher=basic")) == base
    assert run_id(composed("dry_run=true", "hardware.gpus=8")) == base
    others = [
        run_id(composed(change))
        for change in ("optim.lr=1e-3", "steps=61", "objective=gspo", "task.max_length=21")
    ]
    assert len({base, *others}) == 5


def test_paper_topology_is_qwen3_30b_a3bs():
    cfg = OmegaConf.to_container(composed("model=paper_topology").model.config)
    assert (cfg["num_hidden_layers"], cfg["num_experts"], cfg["num_experts_per_tok"]) == (48, 128, 8)
    assert cfg["norm_topk_prob"] is True


def test_qwen3_30b_a3b_has_the_papers_settings():
    gspo = composed("experiment=qwen3_30b_a3b", "task.path=x")
    assert (build_objective(gspo).clip_low, build_objective(gspo).clip_high) == (3e-4, 4e-4)
    assert (gspo.optim.minibatches, gspo.optim.epochs, gspo.advantages) == (4, 1, "paper")
    assert gspo.model.path == "Qwen/Qwen3-30B-A3B-Base"
    assert gspo.replay.source is None
    grpo = composed("experiment=qwen3_30b_a3b", "task.path=x", "arm=grpo_replay")
    assert (build_objective(grpo).clip_low, build_objective(grpo).clip_high) == (0.2, 0.27)
    assert (grpo.replay.source, grpo.arm) == ("old_policy", "grpo+replay")
