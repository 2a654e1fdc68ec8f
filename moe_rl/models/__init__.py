"""Models: a MoE (or its dense control) from a transformers config, or any checkpoint."""

from moe_rl.models.config import ModelConfig, ModelError
from moe_rl.models.experts import set_experts
from moe_rl.models.load import LanguageModel, check_trainable, load_model, prepare
from moe_rl.models.value_head import ValueHead

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "ModelError",
    "ValueHead",
    "check_trainable",
    "load_model",
    "prepare",
    "set_experts",
]
