"""One small MoE, prompts and fixed completions, for every test of TRL's trainer with routing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_moe import SMALL

from moe_rl.models import ModelConfig, load_model
from moe_rl.tasks import get_task

sys.path.insert(0, str(Path(__file__).parent))  # for trainers.py, which tests start processes of as well
torch.set_num_threads(1)
MODEL = SMALL | {"router_aux_loss_coef": 0.0}


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    """TRL's trainers report to their maintainers, but for CI."""
    monkeypatch.setenv("CI", "1")


@pytest.fixture(scope="session")
def scene():
    """Model weights, tokenizer and prompts; `fresh()` is the same model again."""
    task = get_task("sort", min_length=3, max_length=6)
    lm = load_model(ModelConfig(name="small", config=MODEL), task.default_tokenizer)
    state = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}

    def fresh(dtype=torch.float32):
        model = load_model(ModelConfig(name="small", config=MODEL), task.default_tokenizer).model
        model.load_state_dict(state)
        return model.to(dtype)

    prompts = [task.train(i).prompt for i in range(16)]
    return SimpleNamespace(task=task, lm=lm, tokenizer=lm.tokenizer, prompts=prompts, fresh=fresh)


@pytest.fixture
def trainer(scene, tmp_path):
    """Build a trainer on the scene: `trainer(replay="old_policy", beta=0.1, cls=...)`."""

    from trainers import build_trainer

    def build(model=None, **options):
        model = scene.fresh() if model is None else model
        return build_trainer(model, scene.tokenizer, scene.prompts, tmp_path / "trl", **options)

    return build
