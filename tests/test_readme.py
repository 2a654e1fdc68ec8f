"""The README's own code and claims."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = get_task("sort").default_tokenizer()
    config = AutoConfig.for_model(
        "mixtral", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_ten_lines_run_on_a_checkpoint(checkpoint, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert '"DIR_OR_HUB_NAME"' in code
    exec(compile(code.replace("DIR_OR_HUB_NAME", str(checkpoint)), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    changed = float(re.match(r"([\d.]+)% of experts changed", printed)[1])
    assert 0 < changed <= 100


def test_every_file_and_config_it_names_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    groups = ("model", "task", "objective", "replay", "arm", "experiment", "launcher", "engine", "tracking")
    for group in groups:
        (row,) = re.findall(rf"^\| `{group}` \|(.*)\|$", README, re.MULTILINE)
        for choice in re.findall(r"`([a-z_]+)`", row):
            assert (ROOT / "conf" / group / f"{choice}.yaml").exists(), f"{group}={choice}"
