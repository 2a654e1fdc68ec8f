"""Recording: rows, padding, decode steps, and what is not a recording."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from moe_rl.routing import (
    RoutingError,
    RoutingTrace,
    find_routers,
    has_routers,
    record_routing,
    replay_routing,
)


def teacher_forced(model, sequences, mask) -> RoutingTrace:
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=sequences, attention_mask=mask, position_ids=position_ids)
    return recorder.trace()


def test_one_forward(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    seen = []
    for router in find_routers(model):
        router.module.register_forward_hook(
            lambda module, args, output: seen.append(output[2].view(3, 10, 2))
        )
    with record_routing(model) as recorder, torch.no_grad():
        model(ids, attention_mask=mask)
    trace = recorder.trace()
    assert trace.layer_ids == (1, 2)
    assert (trace.num_experts, trace.top_k, trace.experts.dtype) == (8, 2, torch.uint8)
    assert torch.equal(trace.valid, mask.bool())
    expected = torch.stack(seen, dim=2)
    assert torch.equal(trace.experts[trace.valid], expected[trace.valid].to(torch.uint8))
    assert (trace.experts[~trace.valid] == 0).all()


def test_more_than_256_experts_are_int16(build, batch):
    model = build("qwen3_moe", num_experts=300, num_experts_per_tok=4)
    with record_routing(model) as recorder, torch.no_grad():
        model(*batch)
    trace = recorder.trace()
    assert trace.experts.dtype == torch.int16
    assert int(trace.experts.max()) > 256


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_generate_joins_decode_steps(build, batch, family):
    model = build(family)
    ids, mask = batch
    with record_routing(model) as recorder:
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None
        )
    full_mask = torch.cat([mask, torch.ones(3, 6, dtype=mask.dtype)], dim=1)
    trace = recorder.trace()
    assert trace.valid.shape == (3, 15)  # the last sampled token is never routed
    expected = teacher_forced(model, sequences, full_mask)
    assert torch.equal(trace.valid, expected.valid[:, :15])
    assert torch.equal(trace.experts, expected.experts[:, :15])

    after_eos = full_mask.clone()
    after_eos[0, 12:] = 0
    masked = recorder.trace(mask=after_eos)
    assert masked.valid.shape == (3, 16)
    assert not masked.valid[:, 15].any()
    assert torch.equal(masked.valid[:, :15], after_eos[:, :15].bool())
    assert torch.equal(masked.experts[masked.valid], trace.experts[masked.valid[:, :15]])
    assert (masked.experts[~masked.valid] == 0).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generate_with_a_static_cache(build, batch, family, attention):
    model = build(family)
    model.set_attn_implementation("eager" if family == "gpt_oss" else attention)
    options = dict(attention_mask=batch[1], max_new_tokens=6, do_sample=False, eos_token_id=None)
    with record_routing(model) as recorder:
        model.generate(batch[0], **options)
        model.generate(batch[0], **options, cache_implementation="static")
    dynamic, static = recorder.traces()
    assert not dynamic.valid[2, :5].any()
    assert torch.equal(static.valid, dynamic.valid)
    assert torch.equal(static.experts, dynamic.experts)


def test_generate_without_a_mask(build):
    model = build("qwen3_moe")
    ids = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(3))
    with record_routing(model) as recorder:
        sequences = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(recorder.trace().valid, torch.ones(2, 8, dtype=torch.bool))
    expected = teacher_forced(model, sequences, torch.ones_like(sequences))
    assert torch.equal(recorder.trace().experts, expected.experts[:, :8])


def test_rows_cached_before_the_recording_are_not_valid(build, batch):
    model = build("qwen3_moe")
    ids, _ = batch
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with record_routing(model) as recorder:
            model(input_ids=ids[:, :2], past_key_values=cache)
            model(input_ids=ids[:, 2:3], past_key_values=cache)
    trace = recorder.trace()
    assert trace.valid.shape == (3, 13)
    assert not trace.valid[:, :10].any() and trace.valid[:, 10:].all()


def test_a_cache_that_the_model_made_and_one_that_was_cropped(build, batch):
    model = build("qwen3_moe")
    ids, _ = batch
    expected = teacher_forced(model, ids, torch.ones_like(ids))
    with record_routing(model) as recorder, torch.no_grad():
        cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        model(input_ids=ids[:, 5:6], past_key_values=cache)  # a rejected draft token
        cache.crop(-1)
        model(input_ids=ids[:, 6:], past_key_values=cache)
    assert torch.equal(recorder.trace().experts, expected.experts)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_beam_search_is_refused(build, batch, implementation):
    """It permutes the rows of the cache, and with them the sequences that recorded rows belong to."""
    model = build("qwen3_moe")
    ids, mask = batch
    beams = dict(num_beams=2, max_new_tokens=6, do_sample=False, cache_implementation=implementation)
    plain = model.generate(ids, attention_mask=mask, **beams)
    with pytest.raises(RoutingError, match="num_beams > 1"), record_routing(model):
        model.generate(ids, attention_mask=mask, **beams)
    assert torch.equal(model.generate(ids, attention_mask=mask, **beams), plain)
    with record_routing(model) as recorder:  # several samples of a prompt are rows of their own
        model.generate(ids, attention_mask=mask, do_sample=True, num_return_sequences=2, max_new_tokens=2)
    assert len(recorder.trace().valid) == 6


def test_caches_keep_their_order_only_while_they_are_recorded(build, batch):
    model = build("qwen3_moe")
    ids, _ = batch
    order = torch.tensor([2, 0, 1])
    with torch.no_grad(), record_routing(model), record_routing(model) as inner:
        cache = model(input_ids=ids, use_cache=True).past_key_values
        assert isinstance(cache, DynamicCache)
        for move in (cache.reorder_cache, cache.batch_select_indices):
            with pytest.raises(RoutingError, match="reordered inside record_routing"):
                move(order)
        with pytest.raises(RoutingError, match="reordered inside record_routing"):
            cache.batch_repeat_interleave(2)
        copied = copy.deepcopy(cache)
        copied.reorder_cache(order)
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert inner.trace().valid.shape == (3, 11)
    keys = cache.layers[0].keys
    cache.reorder_cache(order)
    assert type(cache) is type(copied) is DynamicCache
    assert vars(cache).keys() == vars(copied).keys()
    assert torch.equal(cache.layers[0].keys, keys[order])
    assert torch.equal(copied.layers[0].keys, keys[order][:, :, :10])


def test_every_uncached_forward_is_a_recording_of_its_own(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    with record_routing(model) as recorder, torch.no_grad():
        with pytest.raises(RoutingError, match="no forward ran"):
            recorder.trace()
        model(input_ids=ids, attention_mask=mask)
        caches = [DynamicCache(config=model.config), DynamicCache(config=model.config)]
        for columns in (slice(0, 6), slice(6, 10)):  # two decodes, interleaved
            model(input_ids=ids[:2, columns], past_key_values=caches[0])
            model(input_ids=ids[2:, columns], past_key_values=caches[1])
    assert [trace.valid.shape for trace in recorder.traces()] == [(3, 10), (2, 10), (1, 10)]
    with pytest.raises(RoutingError, match="expects one recording, got 3"):
        recorder.trace()


def test_a_forward_that_raised_leaves_no_rows(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch

    def fail(module, args, output):
        raise KeyError("stop")

    hook = model.model.layers[2].register_forward_hook(fail)
    with record_routing(model) as recorder, torch.no_grad():
        with pytest.raises(KeyError):
            model(input_ids=ids, attention_mask=mask)
        hook.remove()
        model(input_ids=ids, attention_mask=mask)
    assert torch.equal(recorder.trace().experts, teacher_forced(model, ids, mask).experts)


def test_the_base_model_and_input_embeddings(build, batch):
    model = build("qwen3_moe")
    ids, mask = batch
    embeds = model.get_input_embeddings()(ids)
    with record_routing(model) as recorder, torch.no_grad():
        model.model(input_ids=ids, attention_mask=mask)
        model(inputs_embeds=embeds, attention_mask=mask)
        with pytest.raises(RoutingError, match="outside a forward"):
            model.model.layers[1].mlp(embeds)
    first, second = recorder.traces()
    assert torch.equal(first.experts, second.experts)
    assert torch.equal(first.valid, mask.bool())


def test_a_dense_model_has_no_routing():
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    assert not has_routers(model)
    with pytest.raises(RoutingError, match="Qwen3ForCausalLM has no MoE layer"):
        record_routing(model)
    with pytest.raises(RoutingError, match="Linear has no MoE layer"):
        record_routing(nn.Linear(2, 2))


def test_attention_masks_of_three_dimensions_are_refused(build, batch):
    model = build("qwen3_moe")
    ids, _ = batch
    with record_routing(model) as recorder:
        model(input_ids=ids)
    for context in (record_routing(model), replay_routing(model, recorder.trace())):
        with pytest.raises(RoutingError, match=r"\[B, 1, T, T\], got \[3, 10, 10\]"), context:
            model(input_ids=ids, attention_mask=torch.ones(3, 10, 10))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_recorded_trace_edited_in_place_is_checked_before_replay(build, batch, mode):
    model = build("qwen3_moe")
    ids, mask = batch
    with record_routing(model) as recorder, mode():
        model(input_ids=ids, attention_mask=mask)
    trace = recorder.trace()
    trace.experts[0, 0, 0, :] = 3
    with pytest.raises(RoutingError, match="same expert twice in layer 1"):
        replay_routing(model, trace)
