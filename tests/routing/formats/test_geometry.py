import pytest
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

from moe_rl.routing import RoutingError
from moe_rl.routing.formats import ModelRouting

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def test_dense_layers_follow_each_family_s_own_rule():
    qwen = Qwen3MoeConfig(
        **SMALL,
        num_hidden_layers=6,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        mlp_only_layers=[4],
        decoder_sparse_step=2,
    )
    assert ModelRouting.from_config(qwen) == ModelRouting(6, (1, 3, 5), 8, 3)
    mixtral = MixtralConfig(**SMALL, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2)
    assert ModelRouting.from_config(mixtral) == ModelRouting(3, (0, 1, 2), 4, 2)


def test_published_sizes_without_weights():
    assert ModelRouting.from_config(DeepseekV3Config()) == ModelRouting(61, tuple(range(3, 61)), 256, 8)


def test_a_model_and_its_config_agree():
    config = Qwen3MoeConfig(
        **SMALL, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    )
    model = AutoModelForCausalLM.from_config(config)
    assert ModelRouting.from_model(model) == ModelRouting.from_config(config) == ModelRouting(2, (0, 1), 4, 2)


def test_a_dense_model_has_no_routing_to_import():
    with pytest.raises(RoutingError, match="no MoE layer"):
        ModelRouting.from_config(LlamaConfig(**SMALL, num_hidden_layers=2))


def test_the_text_part_of_a_vision_language_config_counts():
    text = {
        **SMALL,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    }
    config = Qwen3VLMoeConfig(text_config={**text, "moe_intermediate_size": 8})
    assert ModelRouting.from_config(config) == ModelRouting(3, (0, 2), 8, 2)


def test_a_config_of_no_possible_model_is_refused():
    with pytest.raises(RoutingError, match="builds no model of this Qwen3MoeConfig"):
        ModelRouting.from_config(Qwen3MoeConfig(hidden_size=16, num_attention_heads=32))


BAD_LAYERS = [(4, (1, 1), 8, 2), (4, (2, 1), 8, 2), (4, (1, 4), 8, 2), (4, (), 8, 2)]
BAD_K = [(4, (1,), 8, 9), (4, (1,), 8, 0)]


@pytest.mark.parametrize("fields", BAD_LAYERS + BAD_K)
def test_impossible_sizes_are_refused(fields):
    with pytest.raises(RoutingError):
        ModelRouting(*fields)
