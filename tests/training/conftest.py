"""One small MoE and its task, for every test of the loop."""

from dataclasses import replace

import pytest
import torch
from small_moe import SMALL, OnesReward

from moe_rl.models import LanguageModel, ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.store import Run, RunStore
from moe_rl.tasks import get_task
from moe_rl.training.config import EvaluationConfig, OptimConfig, RolloutConfig, TrainConfig
from moe_rl.training.loop import train

torch.set_num_threads(1)


@pytest.fixture
def task():
    return get_task("sort", min_length=3, max_length=5)


@pytest.fixture
def lm(task) -> LanguageModel:
    return load_model(ModelConfig(name="small", config=SMALL), task.default_tokenizer)


@pytest.fixture
def dense_lm(task) -> LanguageModel:
    fields = {
        k: v
        for k, v in SMALL.items()
        if "expert" not in k and k not in ("norm_topk_prob", "moe_intermediate_size")
    }
    return load_model(ModelConfig(name="dense", architecture="qwen3", config=fields), task.default_tokenizer)


@pytest.fixture
def ones_task(task) -> OnesReward:
    return OnesReward(task)


@pytest.fixture
def fresh(lm):
    """The same small model again and again, so that runs start alike."""
    state = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}

    def make() -> LanguageModel:
        lm.model.load_state_dict(state)
        return lm

    return make


@pytest.fixture
def run(ones_task):
    """Train a model on a run directory with an objective; the finished run."""

    def train_it(path, lm, config, objective="grpo", **options) -> Run:
        with RunStore.open(path, {"seed": config.seed}) as store:
            train(lm, ones_task, get_objective(objective, **options), config, store)
        return Run(path)

    return train_it


def small_config(**changes) -> TrainConfig:
    """Four prompts of four responses, two updates a step."""
    base = TrainConfig(
        steps=4,
        checkpoint_every=2,
        rollout=RolloutConfig(prompts=4, responses=4, max_new_tokens=6),
        optim=OptimConfig(lr=3e-3, minibatches=2, warmup_updates=1),
        evaluation=EvaluationConfig(every=2, prompts=8),
    )
    return replace(base, **changes)


@pytest.fixture
def config():
    return small_config
