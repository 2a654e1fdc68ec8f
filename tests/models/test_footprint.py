"""Sizes from a config against real models, published counts and what autograd and caches really hold."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from experiments.benchmarks.topologies import TOPOLOGIES
from moe_rl.models import ModelError
from moe_rl.models.footprint import footprint, kv_cache
from moe_rl.models.memory import (
    Layout,
    layer_activations,
    resting_memory,
    sampler_memory,
    sampling_memory,
    training_memory,
)
from moe_rl.models.published import PUBLISHED, published_config
from moe_rl.routing import has_routers, record_routing
from moe_rl.routing.trace_size import TraceSize

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
        "intermediate_size": 48, "mlp_only_layers": [1],
    },
    "mixtral": {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": None},
    "qwen2_moe": {
        "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24, "tie_word_embeddings": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "intermediate_size": 48,
    },
    "qwen3": {"head_dim": 16, "intermediate_size": 48},
}  # fmt: skip


def config_of(family):
    return AutoConfig.for_model(family, **SMALL | CONFIGS[family])


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_are_those_of_the_real_model(family):
    torch.manual_seed(0)
    sizes, model = footprint(config_of(family)), AutoModelForCausalLM.from_config(config_of(family)).eval()
    layers = model.model.layers
    assert sizes.parameters == model.num_parameters()
    assert sizes.block == max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    assert sizes.root == sizes.parameters - sum(p.numel() for p in layers.parameters())

    ids = torch.randint(64, (2, 5))
    if not has_routers(model):
        assert sizes.trace is None and sizes.active == sizes.parameters
        return
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids)
    trace = recorder.trace()
    assert sizes.trace == TraceSize(len(trace.layer_ids), trace.num_experts, trace.top_k)
    assert sizes.trace.bytes_per_token * 10 == trace.nbytes
    idle = sum(
        experts.gate_up_proj[0].numel() + experts.down_proj[0].numel()
        for experts in (layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts"))
    ) * (trace.num_experts - trace.top_k)
    assert sizes.active == sizes.parameters - idle


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3"])
def test_the_kv_cache_is_what_decoding_holds(family):
    model = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        output = model(input_ids=torch.randint(64, (2, 7)), use_cache=True)
    (cache,) = [value for value in output.values() if isinstance(value, DynamicCache)]
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert footprint(config_of(family)).kv_per_token * 14 == held
    assert footprint(config_of(family)).kv_heads == 2


def test_latent_attention_caches_the_latent_and_the_rotary_key():
    assert kv_cache(config_of("deepseek_v3")) == (3 * (8 + 4), 1)
    assert kv_cache(published_config("deepseek-ai/DeepSeek-V3")) == (61 * (512 + 64), 1)


def test_windows_count_in_full_and_linear_attention_is_not_known():
    config = AutoConfig.for_model("gpt_oss", **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    assert "sliding_attention" in config.layer_types and kv_cache(config) == (3 * 2 * 2 * 8, 2)
    linear = AutoConfig.for_model(
        "qwen3_next", **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    sizes = footprint(linear)
    assert sizes.kv_per_token is None and sizes.trace == TraceSize(3, 4, 2)
    assert "KV cache" not in sampling_memory(sizes, Layout(), 10)


def test_what_cannot_be_counted_is_refused():
    keys = AutoConfig.for_model("doge", **SMALL, is_moe=True, num_experts=16, num_experts_per_tok=4)
    with pytest.raises(ModelError, match="DogeForCausalLM: found no routed experts"):
        footprint(keys)  # experts are rows of an embedding
    with pytest.raises(ModelError, match="builds no model of this Qwen3MoeConfig"):
        footprint(AutoConfig.for_model("qwen3_moe", **SMALL | {"num_key_value_heads": 0}))
    with pytest.raises(ModelError, match=r"only those of Qwen/Qwen3-30B-A3B-Base"):
        published_config("gpt2")


@pytest.mark.parametrize(
    ("name", "total", "active", "short"),
    [  # billions, as their makers say; MoE layers, E and K as the benchmarks' table has them
        ("Qwen/Qwen3-30B-A3B-Base", 30.5, 3.3, "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-235B-A22B", 235, 22, "Qwen3-235B-A22B"),
        ("deepseek-ai/DeepSeek-V3", 671, 37, "DeepSeek-V3"),
        ("moonshotai/Kimi-K2-Instruct", 1000, 32, "Kimi-K2"),
    ],
)
def test_published_models(name, total, active, short):
    sizes = footprint(published_config(name))
    assert sizes.parameters / 1e9 == pytest.approx(total, rel=0.03)
    assert sizes.active / 1e9 == pytest.approx(active, rel=0.03)
    (topology,) = [t for t in TOPOLOGIES if t.name == short]
    assert sizes.trace == TraceSize(topology.layers, topology.experts, topology.top_k)


def test_qwen3_30b_a3b_by_hand():
    expert, attention = 3 * 2048 * 768, 2048 * 128 * (32 + 32 + 4 + 4) + 2 * 128
    block = attention + 2 * 2048 + 128 * 2048 + 128 * expert
    root = 2 * 151936 * 2048 + 2048
    sizes = footprint(published_config("Qwen/Qwen3-30B-A3B-Base"))
    assert (sizes.block, sizes.root) == (block, root)
    assert sizes.parameters == 48 * block + root == 30_532_122_624
    assert sizes.active == sizes.parameters - 48 * 120 * expert == 3_353_032_704
    assert sizes.kv_per_token == 48 * 2 * 4 * 128
    assert len(PUBLISHED) == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_activations_are_about_what_autograd_keeps(family):
    config = AutoConfig.for_model(family, **SMALL | CONFIGS[family] | {"mlp_only_layers": []})
    model = AutoModelForCausalLM.from_config(config)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    hidden = torch.randn(1, 128, 32, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(128)[None])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = model.model.layers[0](hidden, position_embeddings=rotary, attention_mask=None)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    held = sum(size for place, size in storages.items() if place not in owned) / 4 / 128
    assert held == pytest.approx(layer_activations(footprint(config)), rel=0.2)
    assert output.shape == hidden.shape


def test_memory_under_fsdp2_by_hand():
    sizes = footprint(published_config("Qwen/Qwen3-30B-A3B-Base"))
    layout = Layout(gpus=8, compute_bytes=2, checkpointing=True, fused_head=True)
    P, tokens = 30_532_122_624, 1000
    inside = 3 * sizes.active_block // (2 * 2048) + 24 * 2048
    assert training_memory(sizes, layout, tokens, scored=900) == {
        "weights": P // 2,  # 4 bytes over 8 GPUs
        "gradients": P // 2,
        "AdamW moments": 2 * (P // 2),
        "gathered layers": 2 * (sizes.root + 3 * sizes.block),
        "activations": 2 * tokens * (48 * 2048 + inside),
        "head": 4 * 151936 * 2048,
    }
    with_reference = Layout(gpus=8, compute_bytes=2, reference=True)
    held = training_memory(sizes, with_reference, tokens, scored=900)
    assert held["reference policy"] == P // 2
    assert held["activations"] == 2 * tokens * 48 * inside
    assert held["head"] == 2 * 4 * 151936 * 900
    assert resting_memory(sizes, with_reference) == {
        "weights": P // 2, "AdamW moments": 2 * (P // 2), "reference policy": P // 2,
    }  # fmt: skip
    assert sampler_memory(sizes, layout, tokens, tensor_parallel=8) == {
        "weights": 2 * P // 8,
        "KV cache": 2 * 49152 * tokens // 4,  # 4 heads over 8 GPUs
    }
    latent = footprint(published_config("deepseek-ai/DeepSeek-V3"))
    held = sampler_memory(latent, layout, tokens, tensor_parallel=8)
    assert held["KV cache"] == 2 * 61 * 576 * tokens  # every GPU keeps the latent
    alone = sampling_memory(sizes, Layout(), tokens)
    assert alone == {"weights": 4 * P, "AdamW moments": 8 * P, "KV cache": 4 * 49152 * tokens}
    sharded = sampling_memory(sizes, layout, tokens)
    assert sharded["gathered layers"] == 2 * (sizes.root + 2 * sizes.block)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Layout(gpus=0)
