"""A dry run finds what does not fit before weights are loaded, and writes nothing."""

import json
import sys

import pytest
from hydra import compose, initialize_config_dir
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.config import register
from experiments.dry_run import examine
from experiments.findings import size
from experiments.launch import CONF
from experiments.train import main
from moe_rl.tasks import get_task

PAPER = ("experiment=qwen3_30b_a3b", "hardware.disk_gb=2000")


def examined(*overrides):
    register()
    with initialize_config_dir(CONF, version_base="1.3"):
        return examine(compose("config", overrides=list(overrides)))


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(2000)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = get_task("sort").default_tokenizer()
    config = AutoConfig.for_model(
        "mixtral", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path / "checkpoint"
    AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size="8KB")
    tokenizer.save_pretrained(path)
    return path


def test_the_papers_setting_fits_a_node_of_eight(problems):
    found = examined(*PAPER, f"task.path={problems}", "task.grading=exact")
    rows = dict(found.rows)
    assert found.problems == []
    assert rows["model"].startswith("Qwen/Qwen3-30B-A3B-Base: not on this machine, sizes as published")
    assert "30,532,122,624 parameters, 3,353,032,704 active" in rows["sizes"]
    assert rows["  AdamW moments"] == "30.5 GB"  # 8 bytes x 30.5e9 over 8 GPUs
    assert rows["batch"].startswith("256 prompts x 16 responses of 20 + 16,384 tokens")
    assert "385 B a token" in rows["trace"] and "246.1 B as sets" in rows["trace"]
    assert rows["  8 copies on the host"] == size(8 * 4 * 30_532_122_624) == "977.0 GB"
    assert rows["  3 in memory"] == size(3 * 385 * 4096 * (16384 + 20))
    assert rows["  checkpoints"] == "1,099 GB"  # three of 12 bytes x 30.5e9
    assert "everything fits" in str(found)


def test_everything_that_does_not_fit_is_listed():
    found = examined(
        *PAPER, "hardware.gpus=4", "hardware.gpu_memory_gb=80", "hardware.disk_gb=100",
        "hardware.host_memory_gb=64", "rollout.max_new_tokens=32768", "engine.vllm_memory=0.1",
    )  # fmt: skip
    reasons = [problem.partition(",")[0] for problem in found.problems]
    assert reasons == [
        "task.path: not given",
        # 16 bytes over 4 GPUs, 5.0 gathered, 2 x 32,768 x (48 x 2048 + 90,819), the head, vLLM's 8
        "memory of an update: takes 148.8 GB",
        "memory of sampling: takes 99.6 GB",  # 12 bytes over 4 GPUs, and vLLM
        "vLLM's share: takes 16.1 GB",
        # 99.6, 3.7 gathered and 8 x 32,768 tokens of 98,304 bytes; then 4 bytes unsharded and the same tokens
        "memory of evaluation: takes 129.1 GB",
        "memory of the first evaluation: takes 147.9 GB",
        "GPU memory of loading: takes 122.1 GB",
        "host memory of loading: takes 488.5 GB",
        "traces: takes 155.0 GB",
        "disk: takes 1",
    ]
    assert str(found).endswith("\n".join(["does not fit:", *(f"  {p}" for p in found.problems)]))


def test_vllm_keeps_its_memory_in_updates_unless_it_sleeps(monkeypatch):
    def problems():
        found = examined(*PAPER, "hardware.gpu_memory_gb=80")
        return [problem for problem in found.problems if "update" in problem]

    assert problems() == ["memory of an update: takes 97.5 GB, there are 80.0 GB"]  # 73.5 and a share of 24
    monkeypatch.setattr("experiments.dry_run.grpo_settings", lambda *_: {"vllm_enable_sleep_mode": True})
    assert problems() == []


def test_a_kl_term_holds_a_reference_policy():
    rows = dict(examined(*PAPER, "objective.kl_coef=0.1").rows)
    assert rows["  reference policy"] == "15.3 GB"  # 4 bytes x 30.5e9 over 8 GPUs, as the weights
    assert "  reference policy" not in dict(examined(*PAPER).rows)


def test_contradictions_and_other_models_are_problems_too():
    assert examined("optim.minibatches=5").problems[0].startswith("rollout.prompts=32 is not a multiple of")
    (reason,) = examined("model=dense", "replay=old_policy").problems
    assert reason == "replay.source=old_policy: the model has no MoE layers to replay"
    (reason,) = examined("hardware.gpus=4").problems
    assert reason == "hardware.gpus=4: the native engine is one process; engine=trl"
    (reason,) = examined("engine=trl", "rollout.refill=1").problems
    assert reason.startswith("engine=trl cannot honour rollout.refill=1")
    (reason,) = examined("engine=trl", "+model.config.attention_dropout=0.1").problems
    assert reason.startswith("engine=trl cannot honour the model's attention_dropout=0.1: TRL trains in")
    (reason,) = examined("hardware.gpus=0").problems
    assert reason == "hardware.gpus=0: must be above 0"
    (reason,) = examined("+model.config.num_expert=4").problems
    assert "num_expert: Qwen3MoeConfig has no such field" in reason


def test_a_local_checkpoint_is_checked_by_its_headers(checkpoint):
    overrides = ("model=checkpoint", f"model.path={checkpoint}", "rollout.max_new_tokens=24")
    found = examined(*overrides)
    assert found.problems == []
    stored = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(checkpoint).parameters())
    shards = sorted(checkpoint.glob("*.safetensors"))
    assert dict(found.rows)["weights"] == f"{len(shards)} shards, {stored:,} numbers" and len(shards) > 1

    (reason,) = examined(*overrides[:2], "rollout.max_new_tokens=60").problems
    assert "longer than the model's max_position_embeddings=64" in reason
    shards[-1].unlink()
    (reason,) = examined(*overrides).problems
    assert f"1 of {len(shards)} shards are missing, first {shards[-1].name}" in reason
    (checkpoint / "model.safetensors.index.json").unlink()
    (reason,) = examined(*overrides).problems
    assert f"the model has {stored:,}" in reason


def test_turns_count_together():
    found = examined("task=two_turn", "rollout.max_new_tokens=9")
    assert found.problems == []
    assert " + 18 tokens at most" in dict(found.rows)["batch"]
    (reason,) = examined("task=sort", "advantages_by=turn").problems
    assert "the task has one turn" in reason


def test_a_model_that_is_nowhere_is_a_problem():
    (reason,) = examined("model=checkpoint", "model.path=/nowhere/model").problems
    assert reason.startswith("model.path=/nowhere/model: no config of it on this machine")


def test_the_command_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for more, code, said in (
        ("hardware.gpu_memory_gb=1", 0, "dry run: everything fits; nothing was written\n"),
        ("hardware.gpu_memory_gb=0.001", 1, "memory of an update: takes 90.2 MB, there are 1 MB\n"),
        ("-m", 1, "dry_run=true looks at one run: leave out -m\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["train", "dry_run=true", "experiment=demo", more])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == code
        assert said in "".join(capsys.readouterr())
    assert list(tmp_path.iterdir()) == []


def test_sizes_read_well():
    assert [size(n) for n in (0, 385, 1500, 93_245, 403e6, 73.49e9, 1.2211e12)] == [
        "0 B", "385 B", "1.5 kB", "93.2 kB", "403 MB", "73.5 GB", "1,221 GB",
    ]  # fmt: skip
