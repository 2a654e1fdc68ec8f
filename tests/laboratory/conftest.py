"""Tiny models with routers far from uniform, and a batch of responses with left-padded prompts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.training.batch import RolloutBatch

COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    router_aux_loss_coef=0.0,
)
FAMILIES = {
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[]),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "olmoe": dict(num_experts=8, num_experts_per_tok=3),
    "qwen2_moe": dict(num_experts=8, num_experts_per_tok=2, shared_expert_intermediate_size=16),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=8),
    "phimoe": dict(num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v3": dict(
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "minimax_m2": dict(num_local_experts=8, num_experts_per_tok=2, rotary_dim=8),
    "zaya": dict(num_experts=8, num_experts_per_tok=1, router_hidden_size=16),
}


@pytest.fixture
def build():
    """build(family, **config): the same tiny model for the same arguments, in eval mode."""

    def build(family="qwen3_moe", **config):
        torch.manual_seed(0)
        settings = COMMON | FAMILIES[family] | config
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("gate.weight", "router.weight")):
                    parameter.normal_(0, 0.5)
                elif parameter.dim() > 1:
                    parameter.normal_(0, 0.15)  # so that attention and experts move the hidden states
        return model.eval()

    return build


def _batch_of(B=4, S=4, N=6) -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    T = S + N
    ids = torch.randint(3, 64, (B, T), generator=generator)
    ids[1::2, :S] = ids[::2, :S]
    attention, response = torch.ones_like(ids), torch.zeros(B, T)
    for row in range(B):
        padding, length = row // 2 % S, 2 + row % (N - 1)
        attention[row, :padding] = 0
        attention[row, S + length :] = 0
        response[row, S : S + length] = 1
    ids = ids * attention
    return RolloutBatch(ids, attention, response, torch.zeros(B, T), torch.ones(B, dtype=torch.bool), S)


@pytest.fixture
def batch_of():
    """batch_of(B, S, N): B prompts of up to S tokens, pairs with one prompt, responses of 2 to N tokens."""
    return _batch_of


@pytest.fixture
def batch() -> RolloutBatch:
    return _batch_of()
