"""A prompt that rows share, run once: the same log-probabilities, gradients, routing and samples."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MiniMaxConfig, MixtralConfig

from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.routing import RoutingTrace, expert_change, record_routing
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.forward import Forced, Native, Wanted, forward
from moe_rl.training.groups import sample_groups
from moe_rl.training.learner import make_learner
from moe_rl.training.packed import packing_of
from moe_rl.training.passes import native_routing, old_policy_pass, split
from moe_rl.training.policy import score
from moe_rl.training.prefix import distinct_prompts
from moe_rl.training.rollout import sample_responses
from moe_rl.training.seeds import random_stream
from moe_rl.training.sharing import can_share_prompts

from .conftest import SMALL


def batch_of(prompts, responses, pad=0):
    """Rows of (prompt, response) token lists."""
    S, N = max(map(len, prompts)), max(map(len, responses))
    ids, mask, on = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        left, right = S - len(prompt), N - len(response)
        ids.append([pad] * left + prompt + response + [pad] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
        on.append([0.0] * S + [1.0] * len(response) + [0.0] * right)
    ids, mask, on = torch.tensor(ids), torch.tensor(mask), torch.tensor(on)
    return RolloutBatch(ids, mask, on, torch.zeros_like(on), torch.ones(len(ids), dtype=torch.bool), S)


@pytest.fixture
def batch():
    """Two prompts of other lengths with three and two responses, of 1 to 4 tokens."""
    return batch_of([[2, 5, 6, 7]] * 3 + [[2, 8]] * 2, [[3, 4, 5, 1], [3, 1], [9, 9, 1], [4, 4, 4, 1], [1]])


def test_the_places_of_a_packed_batch(batch):
    packing = packing_of(batch, hidden_size=64)
    # S = 4 prompt columns and 3 of the 4 response columns: the last one scores nothing
    assert packing.source_PM.shape == (2, 4 + 3 * 3)
    assert packing.pack(batch.input_ids_BT).tolist()[0] == [2, 5, 6, 7, 3, 4, 5, 3, 1, 0, 9, 9, 1]
    assert packing.real_PM.tolist()[1] == [True] * 10 + [False] * 3  # the second prompt has two responses
    unpacked = packing.unpack(packing.pack(batch.input_ids_BT))
    assert torch.equal(unpacked[:, :-1], batch.input_ids_BT[:, :-1])
    mask = packing.attention_mask(batch.attention_mask_BT, torch.float32)[:, 0] == 0
    assert mask[0, 7].nonzero().flatten().tolist() == [0, 1, 2, 3, 7], (
        "a first token sees its prompt and itself"
    )
    assert mask[0, 12].nonzero().flatten().tolist() == [0, 1, 2, 3, 10, 11, 12]
    assert mask[1, 3].nonzero().flatten().tolist() == [2, 3], "padding on the left is not seen"
    assert mask[1, 11].nonzero().flatten().tolist() == [2, 3, 11], "an empty slot sees itself, not NaN"


def test_neighbouring_rows_share_a_prompt_and_its_padding():
    ids, mask = torch.tensor([[0, 5], [0, 5], [0, 5], [4, 5]]), torch.tensor([[0, 1], [0, 1], [1, 1], [1, 1]])
    prompts = distinct_prompts(ids, mask)
    assert prompts.first_P.tolist() == [0, 2, 3]
    assert prompts.of_row_B.tolist() == [0, 0, 1, 2]


def test_only_cheaper_batches_are_packed(batch):
    assert packing_of(batch[3:4], 64) is None, "nothing is shared"
    long = batch_of([[2, 3]] * 8, [[4] * 400] * 8)
    assert packing_of(long, 64) is None, (
        "attention over eight responses of 400 tokens costs more than is saved"
    )
    assert packing_of(long, 100_000) is not None


@pytest.mark.parametrize("rows", [slice(0, 5), slice(0, 3), slice(1, 4), slice(2, 5), slice(3, 5)])
def test_packed_scores_and_gradients_are_those_of_whole_sequences(lm, batch, rows):
    part, found = batch[rows], []
    for share in (False, True):
        lm.model.zero_grad()
        scores = score(lm.model, part, 0.7, entropy=True, share_prompts=share)
        mask = part.response_mask_BT > 0
        scores.logp_BT[mask].square().sum().backward()
        gradients = [p.grad.clone() for p in lm.model.parameters()]
        found.append((scores.logp_BT.detach()[mask], scores.entropy_BT.detach()[mask], gradients))
    (logp, entropy, grads), (packed_logp, packed_entropy, packed_grads) = found
    assert torch.allclose(packed_logp, logp, atol=2e-6)
    assert torch.allclose(packed_entropy, entropy, atol=2e-6)
    for packed, plain in zip(packed_grads, grads, strict=True):
        assert torch.allclose(packed, plain, atol=2e-5, rtol=1e-4)


def test_packed_routing_is_that_of_whole_sequences(lm, batch):
    with torch.no_grad():
        plain, packed = (
            forward(lm.model, batch, Native(record=True, weights=True), Wanted(), share_prompts=share)
            for share in (False, True)
        )
    scored = batch.attention_mask_BT.bool()
    scored[:, -1] = False
    assert torch.equal(packed.native.valid, scored)
    assert torch.equal(packed.native.experts, plain.native.where(scored).experts)
    weights = plain.gate_weights_BTLK * scored[..., None, None]
    assert torch.allclose(packed.gate_weights_BTLK, weights, atol=1e-6)


def test_a_packed_forward_leaves_a_bool_mask_as_it_is(lm, batch):
    mask = batch.attention_mask_BT.bool()
    with torch.no_grad():
        forward(
            lm.model,
            replace(batch, attention_mask_BT=mask),
            Native(record=True),
            Wanted(),
            share_prompts=True,
        )
    assert torch.equal(mask, batch.attention_mask_BT.bool())


def test_packed_replay_forces_the_trace_and_reports_the_own_choice(lm, batch):
    with torch.no_grad():
        own = forward(lm.model, batch, Native(record=True), Wanted(), share_prompts=True).native
        other = RoutingTrace((own.experts + 1) % own.num_experts, own.valid, own.layer_ids, own.num_experts)
        forced = [
            forward(lm.model, batch, Forced(other), Wanted(), share_prompts=share) for share in (False, True)
        ]
        replayed_own = forward(lm.model, batch, Forced(own), Wanted(), share_prompts=True)
        plain = forward(lm.model, batch, Native(), Wanted(), share_prompts=True)
    rows = batch.routing_rows_BT
    assert expert_change(forced[1].used.where(rows), other.where(rows)).experts == 0
    assert expert_change(forced[1].native.where(rows), forced[0].native.where(rows)).experts == 0
    assert expert_change(forced[1].native.where(rows), own.where(rows)).by_layer[0] == 0, "nothing before it"
    mask = batch.response_mask_BT[:, batch.prompt_length :] > 0
    assert torch.allclose(forced[1].logits_BNV[mask], forced[0].logits_BNV[mask], atol=1e-5)
    assert torch.equal(replayed_own.logits_BNV, plain.logits_BNV), "a model's own trace is the plain forward"


@pytest.mark.parametrize("source", ["old_policy", "rollout"])
def test_every_pass_of_a_step_packs_alike(lm, ones_task, config, source):
    """The same slices, the same path: an unchanged policy has no drift, and ratios of exactly 1."""
    from moe_rl.training.config import ReplayConfig

    options = config(replay=ReplayConfig(source))
    learner = make_learner(lm.model, get_objective("grpo"), options)
    assert learner.share_prompts
    groups = sample_groups(learner, lm, ones_task, 1, record=True)
    plan = split(len(groups.batch), 2, None)
    old = old_policy_pass(learner, groups, plan)
    again = native_routing(lm.model, groups.batch, plan, share_prompts=True)
    assert expert_change(old.trace, again).experts == 0
    rows = plan[0][0]
    new = score(lm.model, groups.batch[rows], 1.0, routing=old.forced[rows], share_prompts=True)
    assert torch.equal(new.logp_BT, old.logp_BT[rows])


def test_samples_from_a_shared_prompt_are_those_of_separate_ones(lm, task, monkeypatch):
    monkeypatch.setattr("moe_rl.training.rollout.WORTH_READING_ONCE", 0)
    prompts = [prompt_ids(lm.tokenizer, task.train(i // 4)) for i in range(12)]
    found = []
    for share in (False, True):
        with random_stream("test"), record_routing(lm.model) as recorder:
            batch = sample_responses(lm, prompts, max_new_tokens=6, temperature=1.0, share_prompts=share)
        found.append((batch, recorder.traces()))
    (plain, _), (shared, traces) = found
    assert torch.equal(shared.input_ids_BT, plain.input_ids_BT)
    assert torch.allclose(shared.sampler_logp_BT, plain.sampler_logp_BT, atol=1e-5)
    assert [trace.valid.shape[0] for trace in traces] == [3, 12], "three prompts were read, for twelve rows"


def test_the_samplers_trace_joins_the_shared_prompts(lm, ones_task, config, monkeypatch):
    learner = make_learner(lm.model, get_objective("grpo"), config())
    plain = sample_groups(replace(learner, share_prompts=False), lm, ones_task, 1, record=True)
    monkeypatch.setattr("moe_rl.training.rollout.WORTH_READING_ONCE", 0)
    shared = sample_groups(learner, lm, ones_task, 1, record=True)
    assert torch.equal(shared.trace.valid, plain.trace.valid)
    assert expert_change(shared.trace, plain.trace).experts == 0


def test_models_that_would_give_something_else_do_not_share(lm):
    assert can_share_prompts(lm.model)
    sizes = dict(
        vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    assert can_share_prompts(AutoModelForCausalLM.from_config(MixtralConfig(**sizes)).eval())
    sliding = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, sliding_window=8)).eval()
    assert not can_share_prompts(sliding), "its cache forgets rows"
    stretched = AutoModelForCausalLM.from_config(
        MixtralConfig(**sizes, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    ).eval()
    assert not can_share_prompts(stretched), "its positions depend on the length"


def test_models_that_fail_on_a_packed_forward_do_not_share():
    sizes = dict(vocab_size=16, hidden_size=32, num_attention_heads=2)
    bloom = AutoModelForCausalLM.from_config(BloomConfig(**sizes, n_layer=1)).eval()
    assert not can_share_prompts(bloom), "it computes its positions from a mask [B, T]"
    minimax = MiniMaxConfig(
        **sizes, intermediate_size=16, num_hidden_layers=2, num_key_value_heads=1, head_dim=16,
        num_local_experts=4, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    assert not can_share_prompts(AutoModelForCausalLM.from_config(minimax).eval()), "it has recurrent states"


@pytest.mark.parametrize("initializer_range", [1e-3, 0.2])
def test_a_model_whose_rows_depend_on_each_other_does_not_share(task, initializer_range):
    """As experts of limited capacity: what a row gets depends on how many rows there are.

    Under the smaller initialisation that moves no log-probability by even 1e-4 nats.
    """
    config = SMALL | {"initializer_range": initializer_range}
    lm = load_model(ModelConfig(name="small", config=config), task.default_tokenizer)
    assert can_share_prompts(lm.model)

    def scaled(module, args, output):
        return output * (1 + 0.01 * output.shape[0])

    handle = lm.model.model.layers[0].self_attn.o_proj.register_forward_hook(scaled)
    try:
        assert not can_share_prompts(lm.model)
    finally:
        handle.remove()
