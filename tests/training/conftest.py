"""One small MoE and its task, for every test of the loop."""

import pytest
import torch

from moe_rl.models import LanguageModel, ModelConfig, load_model
from moe_rl.tasks import get_task

torch.set_num_threads(1)

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large, so that the routing is not close to uniform
}


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
