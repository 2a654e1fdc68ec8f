"""MegaBlocks: weights there and back, its kernels under transformers' experts, its layers in a model."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.models import ModelError, set_experts
from moe_rl.models.megablocks import (
    INSTALL,
    experts_forward,
    from_megablocks,
    load_megablocks,
    replace_with_dmoe,
    to_megablocks,
)
from moe_rl.routing import RoutingTrace, find_routers, record_routing, replay_routing

needs_megablocks = pytest.mark.skipif(
    not importlib.util.find_spec("megablocks"), reason=f"needs MegaBlocks: {INSTALL}"
)
COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, num_experts=8, num_local_experts=8, n_routed_experts=8,
    num_experts_per_tok=2, initializer_range=0.2,
)  # fmt: skip
MLA = dict(
    n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, num_key_value_heads=4, first_k_dense_replace=1,
)  # fmt: skip
IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def build(family="qwen3_moe", **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | fields)
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model):
    return model(input_ids=IDS, attention_mask=MASK).logits


def record(model):
    with record_routing(model) as recorder:
        logits(model)
    return recorder.trace()


def foreign(trace):
    """Every expert replaced by its neighbour."""
    return RoutingTrace(
        (trace.experts + 1) % trace.num_experts, trace.valid, trace.layer_ids, trace.num_experts
    )


def test_weights_by_hand():
    """One expert, D = 1, F = 2: the first F rows of gate_up_proj are the gate, down_proj is transposed."""
    weights = to_megablocks(
        {
            "gate_up_proj": torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]),
            "down_proj": torch.tensor([[[5.0, 6.0]]]),
        }
    )
    assert {name: weight.tolist() for name, weight in weights.items()} == {
        "w1": [[1.0], [2.0]],
        "v1": [[3.0], [4.0]],
        "w2": [[5.0], [6.0]],
    }


@pytest.mark.parametrize("first", ["gate_up_proj", "up_proj"])
def test_weights_come_back_as_they_were(first):
    E, F_, D = 3, 4, 5
    rows = 2 * F_ if first == "gate_up_proj" else F_
    weights = {first: torch.randn(E, rows, D), "down_proj": torch.randn(E, D, F_)}
    back = from_megablocks(to_megablocks(weights), num_experts=E)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


FAMILIES = {
    "qwen3_moe": dict(norm_topk_prob=True),
    "olmoe": dict(num_experts_per_tok=3, num_key_value_heads=4),
    "mixtral": {},
    "qwen2_moe": dict(shared_expert_intermediate_size=16),
    "deepseek_v3": MLA,  # shared expert, sigmoid router
}


@needs_megablocks
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_transformers_equal_the_eager_ones(family):
    """Logits of about 1 within 1e-5, gradients within 1e-4 of the largest of their tensor."""
    eager = build(family, **FAMILIES[family])
    model = copy.deepcopy(eager)
    set_experts(eager, "eager")
    set_experts(model, "megablocks")
    torch.testing.assert_close(logits(model), logits(eager), rtol=0, atol=1e-5)
    for each in (eager, model):
        each.zero_grad()
        logits(each).log_softmax(-1)[:, :, 5].sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max(), name
    assert torch.equal(record(model).experts, record(eager).experts)


@needs_megablocks
def test_experts_in_bfloat16_follow_the_eager_ones():
    eager = build(norm_topk_prob=True).bfloat16()
    model = copy.deepcopy(eager)
    set_experts(eager, "eager")
    set_experts(model, "megablocks")
    error = (logits(model) - logits(eager)).float().norm() / logits(eager).float().norm()
    assert error < 0.02


@needs_megablocks
def test_replay_under_megablocks_experts():
    model = build(norm_topk_prob=True)
    set_experts(model, "megablocks")
    plain, trace = logits(model), record(model)
    with replay_routing(model, trace) as replay:
        assert torch.equal(logits(model), plain)
    assert torch.equal(replay.native.experts, trace.experts)
    with replay_routing(model, foreign(trace)), record_routing(model) as recorder:
        out = logits(model)
        out[MASK.bool()].log_softmax(-1)[:, 5].sum().backward()
    assert not torch.equal(out, plain)
    assert torch.equal(recorder.trace().experts[MASK.bool()], foreign(trace).experts[MASK.bool()])
    assert all(router.module.weight.grad.abs().max() > 0 for router in find_routers(model))


@needs_megablocks
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_replay_under_gradient_checkpointing(use_reentrant):
    """Recomputed layers group the same tokens: gradients are bitwise those without checkpointing."""
    model = build(norm_topk_prob=True).train()
    set_experts(model, "megablocks")
    trace = foreign(record(model))

    def gradients():
        model.zero_grad()
        with replay_routing(model, trace):
            logits(model)[MASK.bool()].log_softmax(-1)[:, 5].sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


@needs_megablocks
def test_generation_with_a_cache_equals_the_eager_one():
    eager = build(norm_topk_prob=True)
    model = copy.deepcopy(eager)
    set_experts(eager, "eager")
    set_experts(model, "megablocks")
    options = dict(input_ids=IDS[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert model.generate(**options).tolist() == eager.generate(**options).tolist()


def family_tests():
    """The module that builds a tiny model of every MoE family of the installed transformers."""
    path = Path(__file__).parents[1] / "routing" / "test_families.py"
    spec = importlib.util.spec_from_file_location("families", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# No stacked experts, or matrices that MegaBlocks cannot multiply; which of the others are dMoE layers.
REFUSED = {"aria_text", "dbrx", "doge", "gpt_oss", "jetmoe", "llama4_text", "longcat_flash"}
DMOE = {
    "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "mellum",
    "minimax", "mixtral", "olmoe", "qwen3_moe",
}  # fmt: skip


@pytest.mark.slow
@needs_megablocks
def test_every_family_equals_eager_or_is_refused():
    families, refused, replaced = family_tests(), set(), set()
    for family in families.discovered():
        model, (ids, mask) = families.build(family), families.batch()
        inputs = dict(input_ids=ids, attention_mask=mask, use_cache=False)
        try:
            set_experts(model, "eager")
            expected = model(**inputs).logits
            set_experts(model, "megablocks")
        except ModelError:
            refused.add(family)
            continue
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-6, msg=family)
        try:
            replace_with_dmoe(model)
        except ModelError:
            continue
        replaced.add(family)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-6, msg=family)
    assert (refused, replaced) == (REFUSED, DMOE)


class Plain(torch.nn.Module):
    """Experts without a gate, as Nemotron-H stacks them."""

    is_transposed = has_bias = has_post_expert_norm = _is_expert_parallel = has_gate = False
    num_experts = 4
    act_fn = staticmethod(lambda x: F.relu(x).square())

    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.randn(4, 8, 12))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 12, 8))


@needs_megablocks
def test_experts_without_a_gate():
    torch.manual_seed(0)
    experts, hidden_ND = Plain(), torch.randn(5, 12)
    ids_NK, weights_NK = torch.tensor([[0, 1], [1, 3], [3, 0], [1, 0], [3, 1]]), torch.rand(5, 2)
    expected_ND = torch.stack(
        [
            sum(
                w * (experts.down_proj[e] @ experts.act_fn(experts.up_proj[e] @ x))
                for e, w in zip(ids, weights, strict=True)
            )
            for x, ids, weights in zip(hidden_ND, ids_NK, weights_NK, strict=True)
        ]
    )
    torch.testing.assert_close(experts_forward(experts, hidden_ND, ids_NK, weights_NK), expected_ND)


@needs_megablocks
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", dict(norm_topk_prob=True)),
        ("qwen3_moe", dict(norm_topk_prob=False, num_experts_per_tok=1)),
        ("olmoe", dict(num_experts_per_tok=3, num_key_value_heads=4)),
        ("mixtral", {}),
        ("granitemoe", {}),  # a softmax over the selected: the same weights as normalised ones
    ],
)
def test_a_model_with_dmoe_layers_is_the_same_model(family, fields):
    """Logits within 1e-5, the same routing, a trace of either model replayed on the other, weights back."""
    original = build(family, **fields)
    model = copy.deepcopy(original)
    replace_with_dmoe(model)
    assert {type(router.module).__name__ for router in find_routers(model)} == {"LearnedRouter"}
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=1e-5)
    trace = record(model)
    assert torch.equal(trace.experts, record(original).experts)
    assert torch.equal(trace.valid, MASK.bool())

    plain = logits(model)
    with replay_routing(model, record(original)) as replay:
        assert torch.equal(logits(model), plain)
    assert torch.equal(replay.native.experts, trace.experts)
    with replay_routing(original, foreign(trace)):
        expected = logits(original)
    with replay_routing(model, foreign(trace)) as replay:
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
        logits(model)[MASK.bool()].log_softmax(-1)[:, 5].sum().backward()
    assert all(router.module.layer.weight.grad.abs().max() > 1e-6 for router in find_routers(model))

    block = find_routers(model)[0].name.removesuffix(".router")
    weights = from_megablocks(model.get_submodule(block).experts.mlp.state_dict(), num_experts=8)
    experts = original.get_submodule(block).experts
    assert all(torch.equal(weights[name], weight) for name, weight in experts.state_dict().items())


@needs_megablocks
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen2_moe", r"also has \['shared_expert', 'shared_expert_gate'\]"),
        ("gpt_oss", "stores its matrices transposed"),
        ("dots1", r"also has \['shared_experts'\]"),
        ("minimax_m2", "MiniMaxM2TopKRouter is not MegaBlocks' router"),
    ],
)
def test_a_block_that_is_no_dmoe_is_refused_before_anything_is_replaced(family, reason):
    model = build(
        family, **(dict(n_shared_experts=1, n_group=1, first_k_dense_replace=0) if family == "dots1" else {})
    )
    with pytest.raises(ModelError, match=reason):
        replace_with_dmoe(model)
    assert not any(type(module).__name__ == "dMoE" for module in model.modules())


class Decoder(torch.nn.Module):
    """Embedding, MegaBlocks layers with residuals, logits: no transformers model anywhere."""

    def __init__(self, layer, **arguments):
        super().__init__()
        layers = load_megablocks().layers
        arguments = dict(
            hidden_size=32, ffn_hidden_size=16, moe_num_experts=8, moe_top_k=2, moe_loss_weight=0,
            activation_fn=F.silu, return_bias=False, mlp_impl="grouped", fp16=False, device="cpu",
            init_method=lambda w: torch.nn.init.normal_(w, 0, 0.3),
        ) | arguments  # fmt: skip
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(
            [getattr(layers, layer)(layers.arguments.Arguments(**arguments)) for _ in range(2)]
        )
        self.head = torch.nn.Linear(32, 64)

    def forward(self, input_ids, attention_mask=None):
        hidden_BTD = self.embed(input_ids)
        for layer in self.layers:
            hidden_BTD = hidden_BTD + layer(hidden_BTD)
        return self.head(hidden_BTD)


def decoder_logits(model):
    return model(IDS, attention_mask=MASK)


LAYERS = [
    ("dMoE", dict(mlp_type="glu", bias=False)),
    ("dMoE", dict(mlp_type="mlp", moe_normalize_expert_weights=1)),
    ("dMoE", dict(mlp_type="glu", moe_top_k=1)),  # LearnedRouter selects by max
    ("dMoE", dict(mlp_type="glu", moe_top_k=4, memory_optimized_mlp=True)),
    ("MoE", dict(moe_capacity_factor=0)),  # as many rows per expert as the fullest one needs
    ("MoE", dict(moe_capacity_factor=1, moe_top_k=1)),  # drops what is over the mean load
]


@needs_megablocks
@pytest.mark.parametrize(("layer", "arguments"), LAYERS)
def test_bare_layers_record_and_replay(layer, arguments):
    model = Decoder(layer, **arguments)
    plain = decoder_logits(model)
    with record_routing(model) as recorder:
        assert torch.equal(decoder_logits(model), plain)
    trace = recorder.trace()
    K = arguments.get("moe_top_k", 2)
    assert trace.experts.shape == (2, 6, 2, K)
    assert (trace.layer_ids, trace.num_experts) == ((0, 1), 8)
    first_BTK = model.layers[0].router.layer(model.embed(IDS)).topk(K).indices
    assert torch.equal(trace.experts[:, :, 0][MASK.bool()].long(), first_BTK[MASK.bool()])

    with replay_routing(model, trace) as replay:
        assert torch.equal(decoder_logits(model), plain)
    assert torch.equal(replay.native.experts, trace.experts)
    with replay_routing(model, foreign(trace)), record_routing(model) as recorder:
        out = decoder_logits(model)
        out[MASK.bool()].log_softmax(-1)[:, 5].sum().backward()
    assert not torch.equal(out[MASK.bool()], plain[MASK.bool()])
    assert torch.equal(recorder.trace().experts[MASK.bool()], foreign(trace).experts[MASK.bool()])
    assert all(each.router.layer.weight.grad.abs().max() > 0 for each in model.layers)


def reference(layer, hidden_ND, experts_NK, weights_NK):
    """A dropless layer's output, token by token, from its own parameters."""
    w1, w2 = (
        w.detach().unflatten(0, (8, -1)) if w.dim() == 2 else w
        for w in (layer.experts.mlp.w1, layer.experts.mlp.w2)
    )
    gated = hasattr(layer.experts.mlp, "v1")
    out_ND = torch.zeros_like(hidden_ND)
    for n, (experts, weights) in enumerate(zip(experts_NK.tolist(), weights_NK, strict=True)):
        for e, weight in zip(experts, weights, strict=True):
            first = w1[e] if w1.shape[1] == 16 else w1[e].T
            inner = F.silu(first @ hidden_ND[n])
            if gated:
                inner = inner * (layer.experts.mlp.v1.unflatten(0, (8, -1))[e] @ hidden_ND[n])
            out_ND[n] += weight * (w2[e].T @ inner)
    return out_ND if layer.experts.bias is None else out_ND + layer.experts.bias


@needs_megablocks
@pytest.mark.parametrize(("layer", "arguments"), LAYERS[:5])
@torch.no_grad()
def test_bare_layers_compute_the_replayed_experts(layer, arguments):
    """Within 1e-5: gate weights are the current router's softmax at the replayed ids, normalised its way."""
    model = Decoder(layer, **arguments)
    with record_routing(model) as recorder:
        decoder_logits(model)
    trace = foreign(recorder.trace())
    seen = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    with replay_routing(model, trace):
        decoder_logits(model)
    hidden_BTD, out_BTD = seen[0]
    rows = MASK.bool()
    experts_NK = trace.experts[:, :, 0][rows].long()
    weights_NK = model.layers[0].router.layer(hidden_BTD[rows]).softmax(-1).gather(1, experts_NK)
    if arguments.get("moe_normalize_expert_weights"):
        weights_NK = weights_NK / weights_NK.sum(1, keepdim=True)
    expected_ND = reference(model.layers[0], hidden_BTD[rows], experts_NK, weights_NK)
    torch.testing.assert_close(out_BTD[rows], expected_ND, rtol=0, atol=1e-5)


@needs_megablocks
def test_the_load_balancing_loss_counts_the_replayed_experts():
    model = Decoder("dMoE", mlp_type="glu", moe_loss_weight=0.1, bias=False).train()
    everything = RoutingTrace(
        torch.tensor([3, 5]).expand(2, 6, 2, 2).clone(), torch.ones(2, 6, dtype=torch.bool), (0, 1), 8
    )
    moe = load_megablocks().layers.moe
    moe.clear_load_balancing_loss()
    with replay_routing(model, everything):
        decoder_logits(model)
    counts = [tokens_E.tolist() for tokens_E, _ in moe.get_load_balancing_loss()]
    moe.clear_load_balancing_loss()
    assert counts == [[0, 0, 0, 12, 0, 12, 0, 0]] * 2
