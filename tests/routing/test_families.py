"""The guarantees of recording and replay, in every causal-LM MoE family that the installed transformers has.

Families are discovered, not listed: one that a new release brings in is built from COMMON and must pass, or
needs an entry here.
"""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_rl.routing import (
    OldWeights,
    RoutingError,
    RoutingTrace,
    Threshold,
    find_routers,
    record_routing,
    replay_routing,
    router_gets_gradient,
)
from moe_rl.routing.gates import RANKS_LOGITS, TopKGate, gate_of

COMMON = dict(
    vocab_size=64,
    unpadded_vocab_size=64,
    hidden_size=32,
    d_model=32,
    intermediate_size=48,
    num_hidden_layers=3,
    n_layers=3,
    num_dense_layers=1,
    first_k_dense_replace=1,
    max_position_embeddings=128,
    max_seq_len=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    # experts
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_topk=2,
    moe_top_k=2,
    moe_k=2,
    top_k_experts=2,
    n_group=2,
    num_expert_group=2,
    topk_group=1,
    moe_intermediate_size=16,
    expert_ffn_hidden_size=16,
    ffn_hidden_size=16,
    shared_intermediate_size=16,
    shared_expert_intermediate_size=16,
    shared_experts_intermediate_size=16,
    moe_shared_expert_intermediate_size=16,
    dense_intermediate_size=48,
    moe_num_shared_experts=1,
    num_shared_experts=1,
    n_shared_experts=1,
    router_hidden_size=16,
    # attention
    num_attention_heads=4,
    n_heads=4,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=8,
    global_head_dim=8,
    v_head_dim=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    kv_lora_rank=16,
    q_lora_rank=16,
    sliding_window=8,
    index_head_dim=16,
    index_n_heads=2,
    index_topk=64,
    # linear attention and state spaces
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_head_dim=8,
    linear_num_heads=4,
    ssm_state_size=8,
    mamba_num_heads=4,
    mamba_head_dim=16,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    hc_count=2,
)
HYBRID = dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
SLIDING = dict(swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=8)
SETTINGS: dict[str, dict] = {
    "bailing_hybrid": HYBRID,
    "beam": dict(mlp_layer_types=["dense", "sparse", "sparse"]),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=16, moe_num_experts=8, moe_top_k=2),
    ),
    "deepseek_v2": dict(topk_method="group_limited_greedy"),
    "doge": dict(num_experts=16, is_moe=True),
    "flint": dict(mlp_only_layers=[0]),
    "gemma4_text": dict(enable_moe_block=True, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8),
    "granitemoehybrid": HYBRID,
    "inkling2_text": SLIDING,
    "inkling2_loop_text": SLIDING
    | dict(
        num_hidden_layers=4,
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        loop_num_passes=3,
        loop_gate_rank=8,
        n_layers_per_attn_res_block=1,
    ),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0),
    "kimi_linear": HYBRID,
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
    "longcat_flash": dict(num_layers=2, zero_expert_num=4),
    "mimo_v2_flash": dict(num_key_value_heads=2),
    "nemotron_h": dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_groups=1),
    "qwen3_5_moe_text": HYBRID,
    "qwen3_next": HYBRID,
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "indexed_attention", "linear_attention"],
        hc_lowrank=16,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "zaya": dict(num_experts_per_tok=1),
}
# L as recorded, where it is not one router call per layer.
LAYER_IDS = {"inkling2_loop_text": (0, 1, 2, 1, 2, 1, 2, 3), "jetmoe": (0, 0, 1, 1, 2, 2)}
# Their experts take no expert ids: a dense product, sorted rows, embeddings.
NO_IDS_AT_EXPERTS = {"doge", "jetmoe", "llama4_text"}
# Their router is the module above the gate.
GATE_WEIGHT = {"dbrx": "router.layer.weight", "doge": "router_gate.weight"}
# Kinds of gates that differ from one another; the rest runs with the slow tests.
FAST = {
    "dbrx",
    "deepseek_v2",
    "deepseek_v4",
    "doge",
    "ernie4_5_moe",
    "gemma4_text",
    "inkling2_loop_text",
    "jetmoe",
    "llama4_text",
    "longcat_flash",
    "phimoe",
    "zaya",
}


def modeling_source(model_type: str) -> str:
    module = model_type_to_module_name(model_type)
    path = Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py"
    return path.read_text() if path.exists() else ""  # some types name classes of other packages


MOE_CLASS = re.compile(r"^class \w*(Experts|Router|MoE|Moe|TopK)\w*\(", re.MULTILINE)
CAUSAL_LM = re.compile(r"^class (\w+ForCausalLM)\(", re.MULTILINE)


def unmapped() -> dict[str, type[PreTrainedModel]]:
    """The causal LMs with MoE classes that AutoModelForCausalLM does not know, by model type."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text()
        if MOE_CLASS.search(source) or '"router_logits":' in source:
            for name in set(CAUSAL_LM.findall(source)) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
                module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
                found[getattr(module, name).config_class.model_type] = getattr(module, name)
    return found


UNMAPPED = unmapped()


def discovered() -> list[str]:
    """One model type per causal LM whose modeling file declares routers; the text type of multimodal ones."""
    types: dict[str, str] = {}
    for model_type, model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if '"router_logits":' in modeling_source(model_type) and (
            model_class not in types or model_type.endswith("_text")
        ):
            types[model_class] = model_type
    return sorted([*types.values(), *UNMAPPED])


FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in discovered()]
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]


def configure(family: str, **changes: object) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[family]
    fields = {field.name for field in dataclasses.fields(config_class)}
    if "text_config" in fields:
        vision = dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
        )
        text = configure(f"{family}_text", **changes).to_dict()
        return config_class(text_config=text, vision_config=vision, audio_config=None)
    common = {name: value for name, value in COMMON.items() if name in fields}
    return config_class(
        **common | SETTINGS.get(family, {}) | {k: v for k, v in changes.items() if k in fields}
    )


def build(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """A tiny model whose gates are far from uniform, whose selection biases and token tables are not zero."""
    torch.manual_seed(0)
    # Weights drawn in float32: some families keep parts of a bfloat16 model in float32.
    make = UNMAPPED[family]._from_config if family in UNMAPPED else AutoModelForCausalLM.from_config
    model = make(configure(family, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for router in find_routers(model):
            for parameter in gate_weights(family, router.module):
                parameter.normal_(0, 0.5)
        for name, tensor in model.state_dict().items():
            if name.endswith("correction_bias"):
                tensor.normal_(0, 0.1)
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), 8).argsort(-1)[:, : tensor.shape[1]])
    return model


def gate_weights(family: str, router: torch.nn.Module) -> list[Tensor]:
    if family in GATE_WEIGHT:
        return [router.get_parameter(GATE_WEIGHT[family])]
    return [p for name, p in router.named_parameters() if name.endswith("weight") and p.dim() == 2]


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = ids[1, :3] = 0
    return ids, mask


def foreign(trace: RoutingTrace) -> RoutingTrace:
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(*trace.experts.shape[:3], trace.num_experts, generator=generator)
    return dataclasses.replace(trace, experts=noise.argsort(-1)[..., : trace.top_k])


def step(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    ids, mask = batch()
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits.float().log_softmax(-1)[..., 5] * mask).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differences(left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> list[str]:
    logits = [] if torch.equal(left[0], right[0]) else ["logits"]
    return logits + [n for n in left[1] if not torch.equal(left[1][n], right[1][n])]


def test_no_family_is_forgotten():
    """Every causal LM with an MoE class in its modeling file declares its routers."""
    names = discovered()
    assert len(names) >= 60
    assert FAST | SETTINGS.keys() | LAYER_IDS.keys() | NO_IDS_AT_EXPERTS | GATE_WEIGHT.keys() <= set(names)
    undeclared = [
        model_type
        for model_type in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *UNMAPPED)
        if MOE_CLASS.search(modeling_source(model_type))
        and '"router_logits":' not in modeling_source(model_type)
    ]
    assert undeclared == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_recording_and_own_replay_change_no_bit(family, dtype, record_property):
    model = build(family, dtype)
    check_own_trace(family, model)
    routers = [router.module for router in find_routers(model)]
    record_property("routers", ", ".join(sorted({type(router).__name__ for router in routers})))
    record_property("gate", ", ".join(sorted({gate_of(router).__name__ for router in routers})))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_foreign_trace_is_followed(family, dtype):
    check_foreign_trace(family, build(family, dtype))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", dict(n_group=1)),  # its group scores are a top-2 of E columns as well
        ("deepseek_v3", dict(norm_topk_prob=False, num_experts_per_tok=4, topk_group=2)),
        ("deepseek_v2", dict(topk_method="greedy")),
        ("deepseek_v2", dict(num_experts_per_tok=4)),
        ("deepseek_v2", dict(n_group=8, topk_group=2)),  # its groups are a top-2 of 8 as well
        ("glm4_moe", dict(n_group=1)),
        ("qwen3_moe", dict(norm_topk_prob=True, num_experts_per_tok=8)),
        ("cohere2_moe", dict(expert_selection_fn="sigmoid", norm_topk_prob=True)),
        ("doge", dict(num_experts=64, num_experts_per_tok=6)),
        ("jetmoe", dict(num_experts_per_tok=3)),
        ("llama4_text", dict(num_experts_per_tok=1)),
    ],
)
def test_variants_of_a_gate(family, changes):
    check_own_trace(family, build(family, **changes))
    if changes.get("num_experts_per_tok") != 8:  # of 8 there are no others
        check_foreign_trace(family, build(family, **changes))


# Routers that do not return gate weights beside ids.
NO_WEIGHTS = {"dbrx", "doge", "jetmoe", "llama4_text"}


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_variants(family, record_property):
    """What variants of replay share with plain replay, where they must agree with it bitwise."""
    model = build(family)
    keep_weights = family not in NO_WEIGHTS
    with record_routing(model, weights=keep_weights) as recorder:
        plain = step(model)
    own = recorder.trace()
    trace = foreign(own)
    with replay_routing(model, trace):
        forced = step(model)
    with replay_routing(model, trace, native=False):
        assert differences(forced, step(model)) == []
    if family == "phimoe":
        refused = pytest.raises(RoutingError, match="one expert after the other")
        with refused, replay_routing(model, trace, variant=Threshold(0.5)):
            step(model)
    else:
        with replay_routing(model, own, variant=Threshold(1.0)) as replay:
            assert differences(plain, step(model)) == []
        assert replay.replaced == 0
        with record_routing(model) as used, replay_routing(model, trace, variant=Threshold(0.9)):
            step(model)
        dataclasses.replace(used.trace()).validate()
    record_property("weights", "–" if family in NO_WEIGHTS else "bitwise")
    if family in NO_WEIGHTS:
        refused = pytest.raises(RoutingError, match="does not return gate weights")
        with refused, record_routing(model, weights=True):
            step(model)
    else:
        with replay_routing(model, own, variant=OldWeights(recorder.weights())):
            assert torch.equal(step(model)[0], plain[0])


TOP_1 = dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 1
)
# Of E columns, where they are not COMMON's 8.
COLUMNS = {"doge": 16, "longcat_flash": 12}


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_weights_of_all_experts_in_any_order(family):
    """With K = E the family's own choice holds the weight of every expert: that is what a trace of the same
    experts in another order must get."""
    if family in ("phimoe", "zaya"):
        pytest.skip(f"the number of experts that {family} chooses is fixed")
    columns = COLUMNS.get(family, 8)
    changes: dict = dict.fromkeys(TOP_1, columns) | dict(topk_group=2)
    if family == "dbrx":
        changes["ffn_config"] = dict(SETTINGS["dbrx"]["ffn_config"], moe_top_k=columns)
    model = build(family, **changes)
    ids, mask = batch()
    keep_weights = family not in NO_WEIGHTS

    def run() -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    with record_routing(model, weights=keep_weights) as own:
        plain = run()
    trace = foreign(own.trace())
    assert trace.top_k == trace.num_experts == columns
    with record_routing(model, weights=keep_weights) as forced, replay_routing(model, trace):
        logits = run()
    valid = trace.valid
    assert torch.allclose(logits[valid], plain[valid], rtol=1e-4, atol=1e-5)
    if keep_weights:
        by_expert = [
            torch.zeros_like(r.weights()).scatter(-1, r.trace().experts.long(), r.weights())[valid]
            for r in (own, forced)
        ]
        assert by_expert[0].max() > 1.5 * by_expert[0].min()  # else any order would do
        assert torch.allclose(*by_expert, rtol=1e-4, atol=1e-5)


def test_what_routers_rank(monkeypatch):
    """Only the routers that are named as such rank logits; `Threshold` reads the others' as probabilities."""
    ranked: list[tuple[str, float]] = []
    topk = TopKGate._topk

    def spy(self, func, input, k, dim=-1, **options):
        if k == self.top_k and self._is_scores(input):
            ranked.append((self.name, float(input[input.isfinite()].min())))
        return topk(self, func, input, k, dim, **options)

    monkeypatch.setattr(TopKGate, "_topk", spy)
    for family in discovered():
        model = build(family)
        for name, tensor in model.state_dict().items():
            if name.endswith(("correction_bias", "balancing_biases")):
                tensor.zero_()
        ids, mask = batch()
        with record_routing(model), torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert len({name for name, _ in ranked}) > 50
    assert {name for name, lowest in ranked if lowest < 0} == RANKS_LOGITS


def check_own_trace(family: str, model: PreTrainedModel) -> None:
    plain = step(model)
    with record_routing(model) as recorder:
        assert differences(plain, step(model)) == []
    trace = recorder.trace()
    expected = tuple(router.layer_id for router in find_routers(model))
    assert trace.layer_ids == LAYER_IDS.get(family, expected)
    dataclasses.replace(trace).validate()
    with replay_routing(model, trace) as replay:
        assert differences(plain, step(model)) == []
    assert torch.equal(replay.native.experts, trace.experts)
    assert torch.equal(replay.native.valid, trace.valid)


def check_foreign_trace(family: str, model: PreTrainedModel) -> None:
    with record_routing(model) as recorder:
        plain, _ = step(model)
    own = recorder.trace()
    trace = foreign(own)
    inputs: list[tuple] = []
    hooks = [
        experts.register_forward_hook(lambda module, args, output: inputs.append(args))
        for experts in map(lambda router: experts_of(model, router), find_routers(model))
        if experts is not None
    ]
    with record_routing(model) as recorder, replay_routing(model, trace) as replay:
        logits, _ = step(model)
    for hook in hooks:
        hook.remove()
    assert not torch.equal(logits, plain)
    valid, used = trace.valid, recorder.trace()
    assert torch.equal(used.experts[valid].long(), trace.experts[valid])
    assert torch.equal(replay.native.experts[:, :, 0], own.experts[:, :, 0])  # nothing was forced before it
    for router in find_routers(model):
        for parameter in gate_weights(family, model.get_submodule(router.name)):
            assert parameter.grad is not None and parameter.grad.abs().max() > 0
    if family in NO_IDS_AT_EXPERTS:
        return
    assert len(inputs) == len(trace.layer_ids)
    for layer, (_, ids_NK, weights_NK, *_) in enumerate(inputs):
        expected = trace.experts[:, :, layer][valid]
        skipped = expected == (trace.num_experts - 1 if family == "zaya" else -1)  # Zaya skips by its last id
        assert torch.equal(ids_NK.view(*valid.shape, -1)[valid], expected.masked_fill(skipped, 0))
        assert torch.equal(weights_NK.view(*valid.shape, -1)[valid] == 0, skipped)


def experts_of(model: PreTrainedModel, router) -> torch.nn.Module | None:
    owner = (
        router.module
        if hasattr(router.module, "experts")
        else model.get_submodule(router.name.rpartition(".")[0])
    )
    return getattr(owner, "experts", None)


# Reentrant checkpointing changes the order of summation of these with or without replay.
REENTRANT_INEXACT = {"doge", "inkling_text", "inkling2_text", "inkling2_loop_text"}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_under_gradient_checkpointing(family, use_reentrant, record_property):
    model = build(family).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{family} does not support gradient checkpointing")
    ids, mask = batch()
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    trace = foreign(recorder.trace())
    torch.manual_seed(3)  # PhiMoE samples in training mode
    with replay_routing(model, trace):
        expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(3)
    with replay_routing(model, trace) as replay:
        checkpointed = step(model)
    assert replay.hits == replay.recomputes == len(trace.layer_ids)
    rounding = "bitwise; reentrant within rounding" if family in REENTRANT_INEXACT else "bitwise"
    record_property("gradients", rounding)
    if use_reentrant and family in REENTRANT_INEXACT:
        for name, gradient in expected[1].items():
            assert torch.allclose(gradient, checkpointed[1][name], rtol=1e-4, atol=1e-5), name
    else:
        assert differences(expected, checkpointed) == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_looped_model_whose_passes_are_recomputed_in_part(use_reentrant):
    """No path leads from pass 0 of layer 1 to layer 2, so its first pass is never recomputed."""
    model = build("inkling2_loop_text").train()
    ids, mask = batch()

    def loss() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return (logits.float().log_softmax(-1)[..., 5] * mask).sum()

    with record_routing(model) as recorder, torch.no_grad():
        loss()
    trace = foreign(recorder.trace())
    names = [name for name, _ in model.named_parameters() if ".layers.2.mlp." in name]
    parameters = [model.get_parameter(name) for name in names]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names or not use_reentrant)
    with replay_routing(model, trace):
        expected = torch.autograd.grad(loss(), parameters)
        twice = torch.autograd.grad(loss() + 2 * loss(), parameters)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})

    def gradients(value: Tensor) -> list[Tensor]:
        if not use_reentrant:
            return list(torch.autograd.grad(value, parameters))
        model.zero_grad()  # which reentrant checkpointing needs backward() for
        value.backward()
        return [parameter.grad.clone() for parameter in parameters]

    with replay_routing(model, trace):
        for _ in range(4):
            for want, got in zip(expected, gradients(loss()), strict=True):
                assert torch.allclose(want, got, rtol=1e-4, atol=1e-5)
        for want, got in zip(twice, gradients(loss() + 2 * loss()), strict=True):
            assert torch.allclose(want, got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_joins_to_the_teacher_forced_recording(family):
    if family == "doge":
        pytest.skip("Doge's router mixes the logits of tokens, so its full forward is not causal")
    model = build(family)
    ids, mask = batch()
    with record_routing(model) as recorder:
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    decoded = recorder.trace()
    mask = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], dim=1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=sequences, attention_mask=mask, position_ids=position_ids, use_cache=False)
    teacher_forced = recorder.trace().fit(11)
    assert torch.equal(decoded.valid, teacher_forced.valid)
    assert torch.equal(decoded.experts, teacher_forced.experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_top_1_routers_that_get_no_gradient(family):
    if family in ("phimoe", "longcat_flash"):
        pytest.skip(f"{family} does not run with one expert per token")
    changes = TOP_1 | (
        dict(ffn_config=dict(SETTINGS["dbrx"]["ffn_config"], moe_top_k=1)) if family == "dbrx" else {}
    )
    model = build(family, **changes)
    step(model)
    for router in find_routers(model):
        assert router.top_k == 1
        largest = max(float(parameter.grad.abs().max()) for parameter in gate_weights(family, router.module))
        assert router_gets_gradient(router) == (largest > 1e-6), (router.name, largest)


# Routers without one score per expert: a table chooses, or one argmax after the other.
NO_SCORES = {"deepseek_v4", "phimoe"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_top_k_of_the_selection_scores_are_the_experts(family):
    model = build(family)
    if family in NO_SCORES:
        with pytest.raises(RoutingError, match="no selection scores"), record_routing(model, scores=True):
            step(model)
        return
    with record_routing(model, scores=True) as recorder:
        step(model)
    scores_BTLE, trace = recorder.scores(), recorder.trace()
    assert scores_BTLE.dtype == torch.float32 and not scores_BTLE.requires_grad
    chosen = torch.zeros_like(scores_BTLE, dtype=torch.bool).scatter(-1, trace.experts.long(), True)
    above = scores_BTLE.masked_fill(~chosen, torch.inf).amin(-1) > scores_BTLE.masked_fill(
        chosen, -torch.inf
    ).amax(-1)
    assert bool(above[trace.valid].all())
    assert bool((scores_BTLE[~trace.valid] == 0).all())
