"""From a dense checkpoint on disk to the drift of an update of the MoE made from it, by the real command."""

import sys

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.measure_drift import main
from moe_rl.store import find_runs
from moe_rl.tasks import get_task


@pytest.fixture
def dense(tmp_path):
    tokenizer = get_task("sort").default_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_an_update_of_an_upcycled_model(dense, tmp_path, monkeypatch):
    options = [
        "model=upcycled", f"model.path={dense}", "model.upcycle.num_experts=6", f"output={tmp_path}",
        "task.min_length=2", "task.max_length=2", "rollout.prompts=4", "rollout.responses=8",
        "rollout.max_new_tokens=4", "optim.minibatches=1", "optim.lr=3e-3", "cold_start.steps=60",
        "cold_start.eval_every=60", "cold_start.batch_size=32", "cold_start.microbatch=null",
        "cold_start.lr=3e-3", "cold_start.eval_prompts=8", "drift.floor=false", "drift.reasons=false",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["measure_drift.py", *options])
    main()
    (run,) = find_runs(tmp_path)
    assert run.summary["cold_start_steps"] == 60
    assert run.summary["layer_ids"] == [0, 1]
    assert 0 < run.summary["experts_changed_first"] < 0.5
    table = pd.read_csv(run.path / "tables/drift.csv", dtype={"subject": str})
    whole = table[(table["metric"] == "experts") & (table["by"] == "all") & (table["rows"] == "response")]
    assert whole["value"].item() == pytest.approx(run.summary["experts_changed_first"])
