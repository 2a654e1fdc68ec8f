"""Which routers a model has, and which of them learn."""

import pytest

from moe_rl.routing import find_routers, has_routers, router_gets_gradient


@pytest.mark.parametrize(
    ("family", "names", "layers", "sizes"),
    [
        ("qwen3_moe", "model.layers.{}.mlp.gate", [1, 2], (8, 2)),
        ("mixtral", "model.layers.{}.mlp.gate", [0, 1, 2], (8, 2)),
        ("olmoe", "model.layers.{}.mlp.gate", [0, 1, 2], (8, 3)),
        ("deepseek_v3", "model.layers.{}.mlp.gate", [1, 2], (8, 2)),
        ("gpt_oss", "model.layers.{}.mlp.router", [0, 1, 2], (8, 2)),
    ],
)
def test_find_routers(build, family, names, layers, sizes):
    model = build(family)
    routers = find_routers(model)
    assert [router.layer_id for router in routers] == layers
    assert [router.name for router in routers] == [names.format(layer) for layer in layers]
    assert all(router.module is model.get_submodule(router.name) for router in routers)
    assert {(router.num_experts, router.top_k) for router in routers} == {sizes}
    assert has_routers(model)


def test_layers_are_ordered_by_number(build):
    model = build("qwen3_moe", num_hidden_layers=12)
    assert [router.layer_id for router in find_routers(model)] == list(range(1, 12))


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("qwen3_moe", dict(num_experts_per_tok=2), True),
        ("qwen3_moe", dict(num_experts_per_tok=1), False),
        ("qwen3_moe", dict(num_experts_per_tok=1, norm_topk_prob=False), True),
        ("mixtral", dict(num_experts_per_tok=1), False),
        ("gpt_oss", dict(num_experts_per_tok=1), False),
        ("olmoe", dict(num_experts_per_tok=1), True),
        ("deepseek_v3", dict(num_experts_per_tok=1), False),
        ("deepseek_v3", dict(num_experts_per_tok=1, norm_topk_prob=False), True),
    ],
)
def test_router_gets_gradient(build, batch, family, config, expected):
    model = build(family, **config)
    router = find_routers(model)[-1]
    assert router_gets_gradient(router) is expected
    # the same, seen by a loss
    ids, mask = batch
    model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[..., 5].sum().backward()
    assert (router.module.weight.grad.abs().max() > 1e-6) == expected
