"""Models: a MoE (or its dense control) from a transformers config, any checkpoint, or an upcycled one."""

from moe_rl.models.config import ModelConfig, ModelError, UpcycleConfig
from moe_rl.models.experts import set_experts
from moe_rl.models.load import LanguageModel, check_trainable, load_model, prepare
from moe_rl.models.upcycle import upcycle
from moe_rl.models.value_head import ValueHead

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "ModelError",
    "UpcycleConfig",
    "ValueHead",
    "check_trainable",
    "load_model",
    "prepare",
    "set_experts",
    "upcycle",
]
