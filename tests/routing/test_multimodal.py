"""Models that read images beside text: rows of image tokens are rows like others, vision towers are dense.

Sizes are the smallest that hold an image of four patches merged into four tokens, or one.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from moe_rl.routing import RoutingError, RoutingTrace, find_routers, record_routing, replay_routing

IMAGE_TOKEN = 60
TEXT = dict(
    vocab_size=64,
    vocab_size_per_layer_input=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_num_experts=8,
    moe_topk=2,
    top_k_experts=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    moe_num_shared_experts=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
    v_head_dim=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    kv_lora_rank=16,
    q_lora_rank=16,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    enable_moe_block=True,
    num_global_key_value_heads=2,
    global_head_dim=8,
    hidden_size_per_layer_input=8,
    sliding_window=8,
)
TOWER = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    image_size=8,
    patch_size=4,
)
QWEN_TOWER = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    out_hidden_size=32,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0],
    image_size=16,
)
M_ROPE = dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=1e4, partial_rotary_factor=1.0)
GRID = dict(image_token_id=IMAGE_TOKEN, video_token_id=61)


def text_config(family: str, **changes: object) -> dict:
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
    return {name: value for name, value in TEXT.items() if name in fields} | changes


def with_grid(family: str, **text: object):
    return CONFIG_MAPPING[family](
        text_config=text_config(f"{family}_text", rope_parameters=M_ROPE, **text),
        vision_config=QWEN_TOWER,
        **GRID,
    )


def aria():
    vision = TOWER | dict(model_type="idefics3_vision")
    return CONFIG_MAPPING["aria"](
        text_config=text_config("aria_text"),
        vision_config=vision,
        image_token_index=IMAGE_TOKEN,
        projector_patch_to_query_dict={4: 4},
        vision_feature_layer=-1,
    )


def gemma4():
    vision = TOWER | dict(pooling_kernel_size=2, position_embedding_size=64)
    del vision["image_size"]
    return CONFIG_MAPPING["gemma4"](
        text_config=text_config("gemma4_text"), vision_config=vision, audio_config=None, **GRID
    )


def mistral3():
    """A family without routers of its own, around a text model that has them."""
    return CONFIG_MAPPING["mistral3"](
        text_config=text_config("mistral4") | dict(model_type="mistral4"),
        vision_config=TOWER | dict(model_type="pixtral", image_size=16),
        image_token_index=IMAGE_TOKEN,
        spatial_merge_size=2,
    )


def patches(image_tokens: Tensor, count: int, size: int) -> dict[str, Tensor]:
    """Images of 4 x 4 patches, as the Qwen and GLM families read them."""
    return dict(
        pixel_values=torch.randn(count * 16, size),
        image_grid_thw=torch.tensor([[1, 4, 4]] * count),
        mm_token_type_ids=image_tokens.int(),
    )


def images(family: str, image_tokens: Tensor) -> dict[str, Tensor]:
    if family in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"):
        return patches(image_tokens, 2, 3 * 2 * 16)
    if family == "gemma4":
        positions = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]] * 2)
        flat = torch.rand(2, 4, 48)
        return dict(pixel_values=flat, image_position_ids=positions, mm_token_type_ids=image_tokens.int())
    pixels = dict(pixel_values=torch.randn(2, 3, 8, 8))
    if family == "aria":
        return pixels | dict(pixel_mask=torch.ones(2, 8, 8, dtype=torch.bool))
    return pixels | dict(image_sizes=torch.tensor([[8, 8], [8, 8]]))


LINEAR = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES: dict[str, tuple[Callable, int]] = {  # configuration, tokens of one image
    "qwen3_vl_moe": (lambda: with_grid("qwen3_vl_moe"), 4),
    "qwen3_5_moe": (lambda: with_grid("qwen3_5_moe", layer_types=LINEAR), 4),
    "glm4v_moe": (lambda: with_grid("glm4v_moe"), 4),
    "aria": (aria, 4),
    "gemma4": (gemma4, 1),
    "mistral3": (mistral3, 1),
}


def build(family: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny model and two sequences with an image each, the second one left-padded."""
    configure, tokens = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(configure()).eval()
    with torch.no_grad():
        for router in find_routers(model):
            for name, parameter in router.module.named_parameters():
                if name.endswith("weight") and parameter.dim() == 2:
                    parameter.normal_(0, 0.5)
    ids = torch.randint(3, 50, (2, 10))
    ids[:, 3 : 3 + tokens] = IMAGE_TOKEN
    mask = torch.ones_like(ids)
    ids[1, :2] = mask[1, :2] = 0
    return model, dict(input_ids=ids, attention_mask=mask) | images(family, ids == IMAGE_TOKEN)


def foreign(trace: RoutingTrace) -> RoutingTrace:
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(*trace.experts.shape[:3], trace.num_experts, generator=generator)
    return dataclasses.replace(trace, experts=noise.argsort(-1)[..., : trace.top_k])


def step(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    (logits.log_softmax(-1)[..., 5] * inputs["attention_mask"]).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_record_and_replay_with_images(family):
    model, inputs = build(family)
    image_tokens = inputs["input_ids"] == IMAGE_TOKEN
    plain = step(model, inputs)
    assert any("vis" in name for name in plain[1])  # the image reaches the loss
    with record_routing(model) as recorder:
        recorded = step(model, inputs)
    trace = recorder.trace()
    assert torch.equal(trace.valid, inputs["attention_mask"].bool())
    assert bool(trace.valid[image_tokens].all())
    with replay_routing(model, trace) as replay:
        replayed = step(model, inputs)
    for other in (recorded, replayed):
        assert torch.equal(plain[0], other[0])
        assert [name for name in plain[1] if not torch.equal(plain[1][name], other[1][name])] == []
    assert torch.equal(replay.native.experts, trace.experts)
    with record_routing(model) as recorder, replay_routing(model, foreign(trace)):
        forced = step(model, inputs)
    assert torch.equal(recorder.trace().experts[trace.valid].long(), foreign(trace).experts[trace.valid])
    assert not torch.equal(plain[0], forced[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_image_tokens_route_by_what_the_image_shows(family):
    model, inputs = build(family)
    traces = []
    for scale in (1.0, -3.0):
        changed = inputs | dict(pixel_values=inputs["pixel_values"] * scale)
        with record_routing(model) as recorder, torch.no_grad():
            model(**changed, use_cache=False)
        traces.append(recorder.trace())
    before_image = slice(2, 3)
    assert torch.equal(traces[0].experts[:, before_image], traces[1].experts[:, before_image])
    assert not torch.equal(traces[0].experts[:, 3:], traces[1].experts[:, 3:])


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_images(family):
    model, inputs = build(family)
    with record_routing(model) as recorder:
        model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None)
    decoded = recorder.trace()
    assert decoded.valid.shape == (2, 12)
    with record_routing(model) as recorder, torch.no_grad():
        position_ids = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        own_positions = family in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")  # from the grid of the image
        model(**inputs | ({} if own_positions else dict(position_ids=position_ids)), use_cache=False)
    prompt = recorder.trace()
    assert torch.equal(decoded.valid[:, :10], prompt.valid)
    assert torch.equal(decoded.experts[:, :10], prompt.experts)


def test_modality_isolated_experts_are_refused():
    """ERNIE 4.5 VL routes text and image tokens apart: no router sees every row."""
    text = text_config("ernie4_5_vl_moe_text", moe_intermediate_size=[16, 16])
    text["rope_parameters"] = dict(rope_type="default", rope_theta=5e5, mrope_section=[1, 1, 2])
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4)
    config = CONFIG_MAPPING["ernie4_5_vl_moe"](text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(RoutingError, match="text tokens and image tokens by routers of their own"):
        record_routing(model)
