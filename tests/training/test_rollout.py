import pytest
import torch
from transformers import GenerationConfig

from moe_rl.models import prepare
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.policy import score
from moe_rl.training.rollout import left_pad, sample_responses
from moe_rl.training.seeds import random_stream


@pytest.fixture
def prompts(lm, task):
    return [prompt_ids(lm.tokenizer, task.train(i)) for i in range(16)]


def sample(lm, prompts, temperature=1.0):
    with random_stream("test"):
        return sample_responses(lm, prompts, max_new_tokens=8, temperature=temperature)


def test_left_pad_by_hand():
    ids, mask = left_pad([[5, 6], [7]], pad_id=0)
    assert ids.tolist() == [[5, 6], [0, 7]]
    assert mask.tolist() == [[1, 1], [0, 1]]


def test_masks_and_rows_of_a_batch(lm, prompts):
    batch = sample(lm, prompts)
    stop = lm.stop_ids[0]
    assert len(set(map(len, prompts))) > 1, "the prompts must need padding for this test to mean anything"
    for row, prompt in enumerate(prompts):
        response = batch.input_ids_BT[row, batch.prompt_length :].tolist()
        length = response.index(stop) + 1 if stop in response else len(response)
        expected = [0] * batch.prompt_length + [1] * length + [0] * (len(response) - length)
        assert batch.response_mask_BT[row].tolist() == expected
        assert batch.attention_mask_BT[row].sum() == len(prompt) + length
        assert batch.responses()[row] == response[:length]
        assert batch.finished_B[row] == (stop in response)
        # The row that scores response token t is row t - 1.
        assert batch.routing_rows_BT[row].int().tolist() == [*expected[1:], 0]
        assert batch.position_ids_BT[row, batch.prompt_length - len(prompt)] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_log_probabilities_are_the_teacher_forced_ones(lm, prompts, temperature):
    batch = sample(lm, prompts, temperature)
    logp_BT = score(lm.model, batch, temperature).logp_BT
    mask = batch.response_mask_BT > 0
    assert torch.allclose(batch.sampler_logp_BT[mask], logp_BT[mask], atol=2e-5)
    assert batch.sampler_logp_BT[~mask].abs().sum() == 0
    # and at another temperature they are not
    assert (score(lm.model, batch, 2.0).logp_BT[mask] - batch.sampler_logp_BT[mask]).abs().max() > 1e-2


def test_log_probability_and_entropy_against_the_full_forward(lm, prompts):
    batch = sample(lm, prompts)
    logits = lm.model(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=batch.position_ids_BT,
    ).logits.double()
    distribution = torch.distributions.Categorical(logits=logits[:, :-1] / 0.7)
    expected_logp, expected_entropy = distribution.log_prob(batch.input_ids_BT[:, 1:]), distribution.entropy()
    scores = score(lm.model, batch, 0.7, entropy=True)
    logp_BT, entropy_BT = scores.logp_BT, scores.entropy_BT
    first = batch.prompt_length
    assert torch.allclose(logp_BT[:, first:].double(), expected_logp[:, first - 1 :], atol=1e-5)
    assert torch.allclose(entropy_BT[:, first:].double(), expected_entropy[:, first - 1 :], atol=1e-5)
    assert logp_BT[:, :first].abs().sum() == 0


def test_a_padded_row_scores_as_it_does_alone(lm, prompts):
    batch = sample(lm, prompts)
    row = min(range(len(prompts)), key=lambda i: len(prompts[i]))
    alone_ids = batch.input_ids_BT[row : row + 1, batch.prompt_length - len(prompts[row]) :]
    logits = lm.model(input_ids=alone_ids).logits
    expected = torch.log_softmax(logits[0, :-1], -1).gather(-1, alone_ids[0, 1:, None])[:, 0]
    n = batch.input_ids_BT.shape[1] - batch.prompt_length
    got = score(lm.model, batch, 1.0).logp_BT[row, -n:]
    seen = batch.response_mask_BT[row, -n:] > 0
    assert torch.allclose(got[seen], expected[-n:][seen], atol=1e-5)


def test_a_checkpoints_own_sampling_defaults_do_not_reach_the_sampler(lm, prompts):
    plain = sample(lm, prompts)
    lm.model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=1,
        top_p=0.1,
        repetition_penalty=2.0,
        min_new_tokens=7,
        eos_token_id=1,
        pad_token_id=0,
    )
    lm = prepare(lm.model, lm.tokenizer)
    other = sample(lm, prompts)
    assert torch.equal(plain.input_ids_BT, other.input_ids_BT)
    assert torch.equal(plain.sampler_logp_BT, other.sampler_logp_BT)


def test_greedy_takes_the_most_likely_token(lm, prompts):
    batch = sample(lm, prompts, temperature=0)
    logits = lm.model(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=batch.position_ids_BT,
    ).logits
    mask = batch.response_mask_BT[:, 1:] > 0
    assert torch.equal(logits[:, :-1].argmax(-1)[mask], batch.input_ids_BT[:, 1:][mask])
