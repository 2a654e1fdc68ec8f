"""Upcycled models are the dense model's function; what cannot be is refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.models import ModelConfig, ModelError, UpcycleConfig, load_model, upcycle
from moe_rl.routing import find_routers, record_routing, replay_routing
from moe_rl.routing.routers import has_routers
from moe_rl.tasks import get_task

SIZES = {
    "vocab_size": 31, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED_ATTENTION = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


def dense_model(family, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SIZES | changes), dtype=dtype
    ).eval()
    with torch.no_grad():  # biases and norms at their initial 0 and 1 would hide that they were not copied
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 31, (3, 11), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids):
    if model.dtype == torch.float64 and has_routers(model):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_function_is_kept(family, tied, ids):
    dense = dense_model(family, tie_word_embeddings=tied, sliding_window=5)
    moe = upcycle(dense, UpcycleConfig(num_experts=5, top_k=3))
    assert moe.config.model_type == FAMILIES[family]
    assert moe.config.tie_word_embeddings is tied
    assert [r.num_experts for r in find_routers(moe)] == [5, 5, 5]
    old, new = logits(dense, ids), logits(moe, ids)
    # The gate weights sum to 1 in float32: one rounding of 6e-8 a layer, relative.
    assert (new - old).abs().max() < 1e-6 * old.abs().max()
    assert dense.config.model_type == family, "the dense model stays what it was"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_is_kept_to_float64_rounding_where_the_gate_weights_are_exact(family, ids):
    dense = dense_model(family)
    moe = upcycle(dense, UpcycleConfig(num_experts=4, top_k=2))
    with torch.no_grad():
        for router in find_routers(moe):
            router.module.weight.zero_()  # gate weights of exactly 1/2
    old, new = logits(dense, ids), logits(moe, ids)
    assert (new - old).abs().max() < 1e-13 * old.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_is_kept_to_float32_rounding(family, ids):
    dense = dense_model(family, torch.float32)
    old, new = logits(dense, ids), logits(upcycle(dense, UpcycleConfig()), ids)
    assert (new - old).abs().max() < 2e-6 * old.abs().max()  # 17 ulp through three layers


@pytest.mark.parametrize("family", FAMILIES)
def test_it_records_replays_trains_and_reloads(family, ids, tmp_path):
    moe = upcycle(dense_model(family, torch.float32), UpcycleConfig(noise=0.1))
    with torch.no_grad(), record_routing(moe) as recorder:
        plain = moe(input_ids=ids).logits
    trace = recorder.trace()
    with replay_routing(moe, trace):
        replayed = moe(input_ids=ids).logits
        replayed.logsumexp(-1).sum().backward()
    assert torch.equal(replayed.detach(), plain)
    for router in find_routers(moe):
        assert router.module.weight.grad.abs().max() > 0
    torch.optim.AdamW(moe.parameters()).step()
    after = logits(moe, ids)
    assert not torch.equal(after, plain)
    moe.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), after)


@torch.no_grad()
def test_noise_is_relative_to_each_matrix_and_seeded():
    dense = dense_model("llama", hidden_size=128, intermediate_size=96, num_hidden_layers=1)
    dense.model.layers[0].mlp.up_proj.weight.mul_(10)
    clean = upcycle(dense, UpcycleConfig(), seed=3).model.layers[0].mlp
    noisy = upcycle(dense, UpcycleConfig(noise=0.1), seed=3).model.layers[0].mlp
    again = upcycle(dense, UpcycleConfig(noise=0.1), seed=3).model.layers[0].mlp
    other = upcycle(dense, UpcycleConfig(noise=0.1), seed=4).model.layers[0].mlp
    assert torch.equal(clean.gate.weight, noisy.gate.weight)
    assert torch.equal(noisy.experts.gate_up_proj, again.experts.gate_up_proj)
    assert not torch.equal(noisy.experts.gate_up_proj, other.experts.gate_up_proj)
    difference = noisy.experts.gate_up_proj - clean.experts.gate_up_proj
    for part in (slice(0, 96), slice(96, 192)):
        own = clean.experts.gate_up_proj[0, part].std()
        for expert in difference[:, part]:
            # 12,288 draws: the standard error of a standard deviation is 0.6 %
            assert expert.std() / own == pytest.approx(0.1, rel=0.03)
    down = noisy.experts.down_proj - clean.experts.down_proj
    assert (down.std() / clean.experts.down_proj[0].std()).item() == pytest.approx(0.1, rel=0.03)
    assert (down[0] * down[1]).mean().abs() < 0.05 * down[0].var(), "experts differ from each other"


def test_the_random_stream_of_the_caller_is_left_alone():
    dense = dense_model("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    upcycle(dense, UpcycleConfig(noise=0.1))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 1}, "supported: llama, mistral, qwen2, qwen3"),
        ("llama", {"attention_bias": True}, r"no place for 12 weights.*self_attn\.k_proj\.bias"),
        ("llama", {"mlp_bias": True}, r"no place for 9 weights.*mlp\.down_proj\.bias"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4},
            "full attention",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4},
            "full attention",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(family, changes, message):
    with pytest.raises(ModelError, match=message):
        upcycle(dense_model(family, **changes), UpcycleConfig())


def test_qwen3_with_biases_has_one(ids):
    dense = dense_model("qwen3", attention_bias=True)
    old, new = logits(dense, ids), logits(upcycle(dense, UpcycleConfig()), ids)
    assert (new - old).abs().max() < 1e-6 * old.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "upcycled", "path": "x"}, "that needs it"),
        ({"source": "upcycled", "upcycle": UpcycleConfig()}, "needs model.path"),
        ({"source": "checkpoint", "path": "x", "upcycle": UpcycleConfig()}, "model.upcycle goes with"),
        ({"path": "x"}, "model=checkpoint and model=upcycled only"),
        ({"source": "upcycled", "path": "x", "upcycle": UpcycleConfig(top_k=1)}, "expected 2 to num_experts"),
        ({"source": "upcycled", "path": "x", "upcycle": UpcycleConfig(2, 3)}, "expected 2 to num_experts"),
        ({"source": "upcycled", "path": "x", "upcycle": UpcycleConfig(noise=-1)}, "at least 0"),
        ({"source": "upcycled", "path": "x", "upcycle": UpcycleConfig(noise=float("nan"))}, "at least 0"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options).check()


def test_a_checkpoint_is_upcycled_when_it_is_loaded(tmp_path, ids):
    tokenizer = get_task("sort").default_tokenizer()
    dense = dense_model("llama", torch.float32)
    dense.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(source="upcycled", path=str(tmp_path), upcycle=UpcycleConfig(6, 2), seed=1)
    lm = load_model(config, default_tokenizer=pytest.fail)
    assert len(find_routers(lm.model)) == 3
    assert lm.stop_ids == tuple(sorted({2, tokenizer.eos_token_id}))
    old, new = logits(dense, ids), logits(lm.model, ids)
    assert (new - old).abs().max() < 1e-5 * old.abs().max()
