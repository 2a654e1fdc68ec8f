"""From a model to an engine's payload and back into the model."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_rl.routing import RoutingError, expert_change, record_routing, replay_routing
from moe_rl.routing.formats import ModelRouting, align_to_mask, from_sglang


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def as_engine(lay, trace, b, tokens):
    """What SGLang sends for sequence b: every decoder layer, all rows but the last."""
    full = np.zeros((tokens - 1, 4, 2), dtype="<i4")
    full[:, 1:] = trace.experts[b][trace.valid[b]][: tokens - 1].numpy()
    return {"meta_info": {"routed_experts": lay.b64(full)}}


def test_an_imported_trace_is_the_recorded_one_and_replays_bitwise(lay, model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    ids = torch.randint(1, 32, mask.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), record_routing(model) as recorder:
        plain = model(input_ids=ids, attention_mask=mask).logits
    recorded = recorder.trace(mask=mask)
    payloads = [as_engine(lay, recorded, b, tokens) for b, tokens in enumerate((5, 7))]
    imported = from_sglang(payloads, ModelRouting.from_model(model), tokens=[5, 7])
    imported = align_to_mask(imported, mask)
    assert imported.valid.int().tolist() == [[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0]]
    assert expert_change(recorded, imported).experts == 0.0
    with torch.no_grad(), replay_routing(model, imported):
        replayed = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(replayed[mask.bool()], plain[mask.bool()])


def test_another_model_s_payload_is_refused_before_it_is_replayed(lay, model):
    other = ModelRouting(num_hidden_layers=4, moe_layer_ids=(0, 1, 2, 3), num_experts=8, top_k=2)
    payload = lay.draw(6, model=other).astype(np.int32)
    with pytest.raises(RoutingError, match="a dense layer holds expert ids"):
        from_sglang(payload, ModelRouting.from_model(model), tokens=7)
