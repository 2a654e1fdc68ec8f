"""Tiny MoE models with random weights, of the families that the routing tests use."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0]),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "olmoe": dict(num_experts=8, num_experts_per_tok=3, num_key_value_heads=4),
    "deepseek_v3": dict(
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=8),
}


@pytest.fixture
def build() -> Callable[..., PreTrainedModel]:
    """build(family, seed=0, dtype=float32, **config): a tiny model in eval mode."""

    def build(
        family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object
    ) -> PreTrainedModel:
        torch.manual_seed(seed)
        settings = COMMON | FAMILIES[family] | config
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
        with torch.no_grad():  # routers far from uniform, so that wrong gate weights show
            for name, parameter in model.named_parameters():
                if name.endswith(("gate.weight", "router.weight")):
                    parameter.normal_(0, 0.5)
        return model.to(dtype).eval()

    return build


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask) [3, 10], the rows left-padded by 0, 2 and 5."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (3, 10), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 2, 5)):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return ids, mask
