import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_rl.models import ModelConfig, load_model
from moe_rl.routing import record_routing
from moe_rl.tasks.encode import answer_ids, prompt_ids
from moe_rl.training.balance import load_balancing_loss
from moe_rl.training.checkpoint import model_tensors, restore_model
from moe_rl.training.cold_start import ColdStartError, cold_start, supervised_loss
from moe_rl.training.config import ColdStartConfig


def test_by_hand():
    # Two tokens, three experts, K = 2: the third is never chosen.
    scores = torch.tensor([[0.5, 0.26, 0.24], [0.26, 0.5, 0.24]]).log()
    # f = (2, 2, 0) / 4 and P = (0.38, 0.38, 0.24): 3 · (0.19 + 0.19)
    assert load_balancing_loss([scores], [2], torch.ones(1, 2)).item() == pytest.approx(1.14)


def test_one_layer_is_transformers_over_k():
    torch.manual_seed(0)
    scores, mask = torch.randn(12, 6), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    theirs = load_balancing_loss_func((scores,), 6, 3, mask)
    assert load_balancing_loss([scores], [3], mask).item() == pytest.approx(theirs.item() / 3, rel=1e-6)


def test_layers_do_not_cancel():
    one = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    collapsed = [one, one.flip(1)]  # each layer sends all to one expert, not the same one
    assert load_balancing_loss(collapsed, [1, 1], torch.ones(1, 2)).item() == pytest.approx(2, rel=1e-3)
    assert load_balancing_loss_func(tuple(collapsed), 2, 1).item() == pytest.approx(1, rel=1e-3)


def test_its_gradient_pushes_the_overloaded_expert_down():
    scores = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    load_balancing_loss([scores], [1], torch.ones(1, 2)).backward()
    assert (scores.grad[:, 0] > 0).all()
    assert (scores.grad[:, 1] < 0).all()


def test_masked_tokens_do_not_count():
    scores = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    kept = load_balancing_loss([scores], [1], torch.tensor([[1, 1, 0]]))
    assert kept.item() == pytest.approx(1, rel=1e-6)


def test_a_model_that_returns_other_scores_is_refused():
    with pytest.raises(ValueError, match="scores of 1 routers and has 2"):
        load_balancing_loss([torch.zeros(2, 2)], [1, 1], torch.ones(1, 2))


def examples(lm, task, n=16):
    problems = [task.warmup(i) for i in range(n)]
    return [(prompt_ids(lm.tokenizer, p), answer_ids(lm.tokenizer, p)) for p in problems]


def load(lm, batch):
    """Balance (1 at best, at most E) of what the routers selected, from a recording."""
    with torch.no_grad(), record_routing(lm.model) as recorder:
        supervised_loss(lm, batch)
    lengths = [len(prompt) + len(answer) for prompt, answer in batch]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    trace = recorder.trace(mask=mask)
    chosen_NLK = trace.experts[trace.valid].long()
    shares = [torch.bincount(c.flatten(), minlength=8) / c.numel() for c in chosen_NLK.unbind(1)]
    return (8 * torch.stack(shares).square().sum(1)).mean().item()


def test_the_supervised_loss_adds_it_for_every_answer_token(lm, task):
    batch = examples(lm, task)
    plain, with_balance = supervised_loss(lm, batch), supervised_loss(lm, batch, 0.5)
    prompts_and_answers = [prompt + answer for prompt, answer in batch]
    p_NLE = torch.cat(  # token by token, without padding
        [
            torch.stack(lm.model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits, 1)
            for ids in prompts_and_answers
        ]
    ).softmax(-1)
    chosen_NLE = torch.zeros_like(p_NLE).scatter(-1, p_NLE.topk(2).indices, 1) / 2
    expected = (8 * (chosen_NLE.mean(0) * p_NLE.mean(0)).sum(-1)).mean()
    answer_tokens = sum(len(answer) for _, answer in batch)
    assert ((with_balance - plain) / answer_tokens).item() == pytest.approx(0.5 * expected.item(), rel=1e-4)


def test_a_cold_start_balances_the_load(lm, task, tmp_path):
    batch = examples(lm, task)
    start = {name: tensor.clone() for name, tensor in model_tensors(lm.model).items()}
    found = {}
    for coef in (0.0, 1.0):
        restore_model(lm.model, start)
        options = ColdStartConfig(
            target_accuracy=0,
            steps=25,
            eval_every=25,
            eval_prompts=4,
            batch_size=16,
            lr=3e-3,
            aux_loss_coef=coef,
        )
        cold_start(
            lm, task, options, temperature=1.0, max_new_tokens=2, identity={"coef": coef}, cache=tmp_path
        )
        found[coef] = load(lm, batch)
    assert found[1.0] < 1.1 < found[0.0]


def test_options_that_cannot_be(lm, task, tmp_path):
    with pytest.raises(ValueError, match="aux_loss_coef=-1: must be at least 0"):
        ColdStartConfig(aux_loss_coef=-1).check()
    dense = load_model(
        ModelConfig(architecture="qwen3", config={"num_hidden_layers": 1, "hidden_size": 8, "head_dim": 4}),
        task.default_tokenizer,
    )
    with pytest.raises(ColdStartError, match="balances the load of experts, and this model has none"):
        cold_start(
            dense, task, ColdStartConfig(aux_loss_coef=0.1), temperature=1.0, max_new_tokens=2, identity={},
            cache=tmp_path,
        )  # fmt: skip
