"""The selection scores of a recording: what they are in each kind of gate, and which rows have them."""

import pytest
import torch

from moe_rl.routing import RoutingError, find_routers, record_routing, replay_routing


def scores_of(model, ids, mask):
    """A recording with scores, and the logits of its routers [B, T, L, E]."""
    with record_routing(model, scores=True) as recorder, torch.no_grad():
        output = model(ids, attention_mask=mask, use_cache=False, output_router_logits=True)
    return recorder, torch.stack([layer.view(*ids.shape, -1) for layer in output.router_logits], dim=2)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_probabilities_where_the_top_k_is_over_the_softmax(build, batch, family):
    recorder, logits_BTLE = scores_of(build(family), *batch)
    valid = recorder.trace().valid
    assert torch.equal(recorder.scores()[valid], logits_BTLE.softmax(-1)[valid])


def test_logits_where_the_softmax_follows_the_top_k(build, batch):
    recorder, logits_BTLE = scores_of(build("gpt_oss"), *batch)
    valid = recorder.trace().valid
    assert torch.equal(recorder.scores()[valid], logits_BTLE[valid])


def test_bias_and_group_mask_are_in_the_scores(build, batch):
    model = build("deepseek_v3")  # two groups of four experts, one of which is chosen
    bias_E = torch.linspace(-0.2, 0.2, 8)
    for router in find_routers(model):
        router.module.e_score_correction_bias.copy_(bias_E)
    recorder, logits_BTLE = scores_of(model, *batch)
    scores, valid = recorder.scores(), recorder.trace().valid
    outside = scores == -torch.inf
    assert bool((outside[valid].sum(-1) == 4).all()) and bool((scores[~valid] == 0).all())
    biased = logits_BTLE.sigmoid() + bias_E
    inside = ~outside & valid[..., None, None]
    torch.testing.assert_close(scores[inside], biased[inside], atol=1e-6, rtol=0)


def test_scores_of_decode_steps_join(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    with record_routing(model, scores=True, weights=True) as recorder:
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None
        )
    whole = torch.cat([mask, torch.ones(3, 4, dtype=mask.dtype)], dim=1)
    with record_routing(model, scores=True) as full, torch.no_grad():
        model(sequences, attention_mask=whole, position_ids=(whole.cumsum(1) - 1).clamp(min=0))
    assert recorder.scores().shape == (3, 13, 2, 8) and recorder.weights().shape == (3, 13, 2, 2)
    torch.testing.assert_close(recorder.scores(), full.scores()[:, :13], atol=1e-6, rtol=1e-5)


def test_under_replay_they_are_the_routers_own(build, batch):
    model = build("qwen3_moe", num_hidden_layers=2)  # one MoE layer: its inputs do not depend on routing
    plain, _ = scores_of(model, *batch)
    other = plain.scores().argsort(-1)[..., :2]  # the least probable experts
    trace = type(plain.trace())(other, plain.trace().valid, plain.trace().layer_ids, 8)
    with replay_routing(model, trace):
        replayed, _ = scores_of(model, *batch)
    assert torch.equal(replayed.scores(), plain.scores())
    assert torch.equal(replayed.trace().experts[trace.valid].long(), other[trace.valid])


def test_scores_that_were_not_asked_for(build, batch):
    model = build("mixtral")
    with record_routing(model, weights=True) as recorder, torch.no_grad():
        model(*batch)
    with pytest.raises(RoutingError, match="record_routing\\(model, scores=True\\)"):
        recorder.scores()
