"""Worded problems end to end through the real entry point: checkpoint, chat template, graders."""

import json
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.train import main
from moe_rl.store import find_runs
from moe_rl.tasks import bpe_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY = ["rollout.prompts=2", "rollout.responses=2", "optim.minibatches=2", "evaluation.prompts=4", "steps=2"]


def run(monkeypatch, output, *overrides):
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides, *TINY, f"output={output}"])
    main()
    (found,) = find_runs(output)
    return found


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [
        {"prompt": f"What is {a} + {b}? Größe: π", "answer": str(a + b)} for a in range(8) for b in range(8)
    ]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def checkpoint(tmp_path, problems):
    """A bfloat16 OLMoE with a BPE tokenizer, a chat template and sampling defaults of its own."""
    tokenizer = bpe_tokenizer([problems.read_text(encoding="utf-8")])
    tokenizer.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        "olmoe", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.update(do_sample=True, top_p=0.5, top_k=3)
    model.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_jsonl_on_a_checkpoint_with_a_chat_template(tmp_path, monkeypatch, checkpoint, problems):
    result = run(
        monkeypatch, tmp_path / "out", "model=checkpoint", f"model.path={checkpoint}", "task=jsonl",
        f"task.path={problems}", "cold_start.enabled=false", "rollout.max_new_tokens=6", "arm=grpo_replay",
    )  # fmt: skip
    assert result.status == "done"
    assert result.steps()["mismatch/logp_abs_diff_max"].max() < 1e-3, (
        "the checkpoint's top-p reached the sampler"
    )
    assert result.summary["layer_ids"] == [0, 1]
    again = AutoModelForCausalLM.from_pretrained(result.path / "final")
    assert again.config.model_type == "olmoe"


@pytest.mark.parametrize("family", ["chain_sum", "spell_backward"])
def test_reasoning_gym_from_config_to_done(tmp_path, monkeypatch, family):
    pytest.importorskip("reasoning_gym")
    result = run(
        monkeypatch, tmp_path / "out", "task=reasoning_gym", f"task.family={family}",
        "rollout.max_new_tokens=6", "model.config.num_hidden_layers=2", "cold_start.steps=2",
        "cold_start.eval_every=2",
        "cold_start.batch_size=8", "cold_start.eval_prompts=4", "cold_start.target_accuracy=0",
    )  # fmt: skip
    assert result.status == "done"
    assert result.config["task"]["family"] == family
    assert len(result.steps()) == 2
