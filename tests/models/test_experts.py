"""Choosing what runs the experts of a model: equal numbers, and one clear line where it cannot be."""

import importlib.util

import pytest
import torch

from moe_rl.models import ModelConfig, ModelError, load_model, set_experts
from moe_rl.models.experts import stacked_experts
from moe_rl.models.megablocks import INSTALL
from moe_rl.tasks import get_task

SMALL = dict(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    initializer_range=0.2,
)
DENSE = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def load(**options):
    config = {"config": SMALL} | options
    return load_model(ModelConfig(**config), get_task("sort").default_tokenizer).model


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_every_implementation_gives_the_eager_logits(experts):
    eager, other = load(experts="eager"), load(experts=experts)
    for model, name in ((eager, "eager"), (other, experts)):
        assert {module.config._experts_implementation for module in stacked_experts(model)} == {name}
    torch.testing.assert_close(other(input_ids=IDS).logits, eager(input_ids=IDS).logits, rtol=0, atol=2e-5)


def test_unset_leaves_the_choice_to_transformers():
    assert {module.config._experts_implementation for module in stacked_experts(load())} == {"grouped_mm"}


def test_a_wrong_name_is_one_line():
    with pytest.raises(
        ValueError, match=r"^model\.experts=fast: expected eager, grouped_mm, batched_mm, megablocks or null$"
    ):
        load(experts="fast")


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "megablocks"])
def test_a_model_whose_experts_are_fixed_is_refused(experts):
    with pytest.raises(ModelError, match=f"experts={experts}: Qwen3ForCausalLM has no experts"):
        load(architecture="qwen3", config=DENSE, experts=experts)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (
            "gpt_oss",
            "GptOssExperts, which stores its matrices transposed and has biases: use model.experts=eager",
        )
    ],
)
def test_megablocks_refuses_experts_it_cannot_run(family, reason):
    fields = SMALL | dict(num_local_experts=8)
    fields = {key: fields[key] for key in fields if key not in ("moe_intermediate_size", "norm_topk_prob")}
    with pytest.raises(ModelError, match=reason):
        load(architecture=family, config=fields, experts="megablocks")


@pytest.mark.skipif(bool(importlib.util.find_spec("megablocks")), reason="MegaBlocks is installed")
def test_without_megablocks_the_install_line_is_named():
    with pytest.raises(ModuleNotFoundError) as error:
        set_experts(load(), "megablocks")
    assert str(error.value).endswith(INSTALL)
    assert "megablocks, " in str(error.value)
