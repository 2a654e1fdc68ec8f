from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.routing import record_routing
from moe_rl.tasks.encode import answer_ids, prompt_ids
from moe_rl.training.balance import load_balancing_loss
from moe_rl.training.checkpoint import model_tensors, restore_model
from moe_rl.training.cold_start import ColdStartError, cold_start, supervised_loss
from moe_rl.training.config import ColdStartConfig, OptimConfig
from moe_rl.training.groups import sample_groups
from moe_rl.training.learner import make_learner


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


def test_an_update_adds_it_to_the_gradient_and_logs_it(tmp_path, fresh, run, ones_task, config):
    """The first update's gradient is that of the objective plus coef times that of the loss by hand."""
    coef = 0.3
    plain, found = {}, {}
    for name, value, kept in (("plain", 0.0, plain), ("balanced", coef, found)):
        lm = fresh()
        optim = OptimConfig(lr=0.0, minibatches=2, max_grad_norm=1e9, aux_loss_coef=value)
        result = run(tmp_path / name, lm, config(steps=1, optim=optim, drift_every=0))
        kept["updates"], kept["steps"] = result.updates(), result.steps()
        # lr is 0, so the last update's gradients are of the weights that sampled
        kept["grad"] = {n: p.grad.clone() for n, p in lm.model.named_parameters() if p.grad is not None}
    assert "aux_loss" not in plain["updates"]
    assert found["updates"]["loss"].tolist() == pytest.approx(plain["updates"]["loss"].tolist(), abs=1e-6)

    learner = make_learner(lm.model, get_objective("grpo"), config(optim=OptimConfig(minibatches=2)))
    groups = sample_groups(replace(learner, share_prompts=False), lm, ones_task, 1)
    rows = groups.batch[8:]
    lm.model.zero_grad()
    output = lm.model(
        input_ids=rows.input_ids_BT,
        attention_mask=rows.attention_mask_BT,
        position_ids=rows.position_ids_BT,
        output_router_logits=True,
    )
    by_hand = load_balancing_loss(output.router_logits, [2, 2], rows.attention_mask_BT)
    assert found["updates"]["aux_loss"][1] == pytest.approx(by_hand.item(), rel=1e-5)
    assert found["steps"]["aux_loss"][0] == pytest.approx(found["updates"]["aux_loss"].mean())
    by_hand.backward()
    gates = [name for name in found["grad"] if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    for name in gates:
        added = found["grad"][name] - plain["grad"][name]
        expected = coef * lm.model.get_parameter(name).grad
        assert torch.allclose(added, expected, atol=1e-6) and expected.abs().max() > 1e-4


def test_micro_batches_weigh_by_their_share_of_the_responses(tmp_path, fresh, run, config):
    optim = OptimConfig(lr=0.0, minibatches=2, aux_loss_coef=0.1)
    whole = run(tmp_path / "whole", fresh(), config(steps=1, optim=optim, drift_every=0)).updates()
    parts = replace(optim, microbatch=3)
    sliced = run(tmp_path / "parts", fresh(), config(steps=1, optim=parts, drift_every=0)).updates()
    # each is the balance of its own tokens: near that of the whole, and never three times it
    assert sliced["aux_loss"].tolist() == pytest.approx(whole["aux_loss"].tolist(), rel=0.2)
    assert sliced["aux_loss"].tolist() != whole["aux_loss"].tolist()


def test_rl_balances_the_load(tmp_path, fresh, run, config):
    found = {}
    for coef in (0.0, 1.0):
        optim = OptimConfig(lr=3e-3, minibatches=2, warmup_updates=1, aux_loss_coef=coef)
        steps = run(tmp_path / str(coef), fresh(), config(steps=5, optim=optim, drift_every=5)).steps()
        found[coef] = steps["load/max_violation"].iloc[-1]
    assert found[1.0] < 0.7 * found[0.0]


def test_a_dense_model_has_no_load(dense_lm, config):
    options = config(optim=OptimConfig(aux_loss_coef=0.1))
    with pytest.raises(ValueError, match=r"optim.aux_loss_coef=0.1: the model has no experts to balance"):
        make_learner(dense_lm.model, get_objective("grpo"), options)
