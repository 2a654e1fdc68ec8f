"""The sizes of published MoE models, as in their config.json, for arithmetic without a download."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from moe_rl.models.config import ModelError

_QWEN3 = {
    "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip

# Name on the hub -> transformers' model_type and the fields that decide sizes. The counts of parameters that
# follow are the published ones: 30.5 B (3.3 B active), 235 B (22 B), 671 B (37 B), 1 T (32 B).
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    # arXiv 2505.09388, table 2; the base of arXiv 2507.18071, 5.1. The base's context is 32,768.
    "Qwen/Qwen3-30B-A3B-Base": (
        "qwen3_moe",
        _QWEN3 | {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "max_position_embeddings": 32768,
        },
    ),
    "Qwen/Qwen3-235B-A22B": (
        "qwen3_moe",
        _QWEN3 | {
            "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "num_hidden_layers": 94, "num_attention_heads": 64, "max_position_embeddings": 40960,
        },
    ),
    # arXiv 2412.19437, 4.2: the first 3 layers are dense. Without its multi-token prediction layer.
    "deepseek-ai/DeepSeek-V3": (
        "deepseek_v3",
        _DEEPSEEK | {
            "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
            "n_routed_experts": 256, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
            "max_position_embeddings": 163840,
        },
    ),
    # arXiv 2507.20534, 2.3: DeepSeek-V3's architecture, one dense layer. Its model_type is kimi_k2.
    "moonshotai/Kimi-K2-Instruct": (
        "deepseek_v3",
        _DEEPSEEK | {
            "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
            "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip


def published_config(name: str) -> PreTrainedConfig:
    """The config of a model in `PUBLISHED`. Raises ModelError for another name."""
    if name not in PUBLISHED:
        raise ModelError(f"{name}: its sizes are not kept here, only those of {', '.join(PUBLISHED)}")
    architecture, fields = PUBLISHED[name]
    return AutoConfig.for_model(architecture, **fields)
