"""`dry_run=true`: what can be checked of a run without its weights, and what it will take.

    python -m experiments.train experiment=qwen3_30b_a3b task.path=problems.jsonl dry_run=true

Prints a table and what does not fit; exits with 0 or 1. Writes nothing, not even the output folder.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import transformers
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from experiments.config import Config, build_objective, build_task, train_config
from experiments.findings import Findings
from experiments.trl_options import grpo_settings, require_honoured, require_no_noise
from experiments.weigh import weigh
from moe_rl.models import LanguageModel, ModelConfig, ModelError, prepare
from moe_rl.models.footprint import footprint, without_weights
from moe_rl.models.load import architecture_config
from moe_rl.models.published import PUBLISHED, published_config
from moe_rl.tasks import Task
from moe_rl.tasks.encode import prompt_ids, said_ids
from moe_rl.training.border import (
    check_model,
    check_together,
    check_turns,
    require_encodable,
    require_gradable,
    require_room,
    some_problems,
)
from moe_rl.training.learner import needed_tensors


class DryRun(Callback):
    """Runs in place of the job, before Hydra makes a directory for it."""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        if not config.dry_run:
            return
        job = copy.deepcopy(config)
        with read_write(job), open_dict(job):
            del job["hydra"]
            job.dry_run = False
        transformers.logging.set_verbosity_error()
        findings = examine(job)
        print(findings)
        sys.exit(1 if findings.problems else 0)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        if config.dry_run:
            print("failed: dry_run=true looks at one run: leave out -m", file=sys.stderr)
            sys.exit(1)


def examine(cfg: DictConfig) -> Findings:
    """Everything found of a composed config; a part that fails does not hide those behind it."""
    findings = Findings()
    missing = sorted(OmegaConf.missing_keys(cfg))
    for key in missing:
        findings.problem(f"{key}: not given")
        OmegaConf.update(cfg, key, "not given")
    device, elsewhere = cfg.device, cfg.hardware.gpu_memory_gb is not None
    if elsewhere:
        cfg.device = "cpu"  # that of the machines planned for need not be here
    try:
        config = train_config(cfg)
        config.device = device
        objective = build_objective(cfg)
    except ValueError as error:
        findings.problem(error)
        return findings
    with findings.collecting():
        check_together(objective, config)
    if config.engine.name == "native" and config.hardware.gpus > 1:
        findings.problem(
            f"hardware.gpus={config.hardware.gpus}: the native engine is one process; engine=trl"
        )
    task = None
    if not any(key.startswith("task.") for key in missing):
        with findings.collecting():
            task = build_task(cfg)
            check_turns(task, config)
            if config.engine.name == "trl":
                require_honoured(config, objective, task, config.hardware.gpus)
            require_gradable(task, config.rollout.grading_timeout)
    tokenizer, architecture = find_model(findings, config.model, task)
    model = lm = None
    if architecture is not None:
        with findings.collecting():
            model = without_weights(architecture)
            check_model(model, objective, config)
            if config.engine.name == "trl":
                require_no_noise(architecture)
            if tokenizer is not None:
                lm = prepare(model, tokenizer)
    prompt = 0 if task is None else longest_prompt(findings, task, lm, config)
    if architecture is not None and model is not None:
        try:
            sizes = footprint(architecture)
        except ModelError as error:
            findings.add("sizes", f"not computed: {error}")
            return findings
        routed = "dense"
        if (trace := sizes.trace) is not None:
            routed = f"{trace.layers} routers of {trace.num_experts} experts, top-{trace.top_k}"
        findings.add(
            "sizes",
            f"{sizes.parameters:,} parameters, {sizes.active:,} active; {sizes.layers} layers, {routed}",
        )
        if config.model.source == "checkpoint" and Path(str(config.model.path)).is_dir():
            with findings.collecting():
                check_weights(findings, Path(str(config.model.path)), sizes.parameters)
        turns = 1 if task is None else len(task.train(0).turns)
        settings = grpo_settings(config, objective, config.output, 0, config.hardware.gpus)
        awake = not settings.get("vllm_enable_sleep_mode")
        reference = "ref_logp_BT" in needed_tensors(objective)
        weigh(findings, sizes, config, prompt, turns, awake=awake, reference=reference)
    return findings


def find_model(
    findings: Findings, model: ModelConfig, task: Task | None
) -> tuple[PreTrainedTokenizerBase | None, PreTrainedConfig | None]:
    """Tokenizer and config as far as they are on this machine; nothing is downloaded."""
    if model.source == "config":
        if task is None:
            findings.add("model", f"{model.name}: its vocabulary is the task's, which is not there")
            return None, None
        findings.add("model", f"{model.name}, built from its config ({model.architecture})")
        tokenizer = task.default_tokenizer()
        with findings.collecting():
            return tokenizer, architecture_config(model, tokenizer)
        return tokenizer, None
    path = str(model.path)
    if model.source == "upcycled" or path.endswith(".gguf") or path.startswith("package:"):
        findings.add("model", f"{path}: sizes of upcycled models and GGUF files are not computed")
        return None, None
    trust_remote_code = model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        findings.add("model", f"{path}, its config.json read")
    except (OSError, ValueError) as error:
        if path not in PUBLISHED:
            reason = str(error).strip().partition("\n")[0]
            findings.problem(f"model.path={path}: no config of it on this machine: {reason}")
            return None, None
        findings.add("model", f"{path}: not on this machine, sizes as published")
        config = published_config(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return tokenizer, config
    except (OSError, ValueError):
        findings.add("tokenizer", "not on this machine, not checked")
        return None, config


def longest_prompt(findings: Findings, task: Task, lm: LanguageModel | None, config: Config) -> int:
    """Tokens of the longest prompt among the problems that are looked at, of all its turns together.

    Without a tokenizer bytes: byte-level tokenizers make at most one token of a byte.
    """
    if lm is not None:
        with findings.collecting():
            require_encodable(lm, task)
            require_room(lm, task, config)
    problems, longest = [problem for _, _, problem in some_problems(task)], 0
    with findings.collecting():
        longest = max(
            sum(len(turn.prompt.encode()) for turn in problem.turns)
            if lm is None
            else len(prompt_ids(lm.tokenizer, problem))
            + sum(len(said_ids(lm.tokenizer, turn)) for turn in problem.later)
            for problem in problems
        )
    count = (
        "without end"
        if task.train_size is None
        else f"{task.train_size} problems + {task.test_size} held out"
    )
    unit = "tokens" if lm is not None else "bytes, at most as many tokens"
    findings.add("task", f"{type(task).__name__}, {count}; longest prompt {longest:,} {unit}")
    return longest


def check_weights(findings: Findings, directory: Path, parameters: int) -> None:
    """Whether all shards of a checkpoint are there and hold the model's parameters, by their headers."""
    index = directory / "model.safetensors.index.json"
    shards = sorted(directory.glob("*.safetensors"))
    if index.exists():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if lost := sorted(named - {shard.name for shard in shards}):
            findings.problem(f"{directory}: {len(lost)} of {len(named)} shards are missing, first {lost[0]}")
            return
    stored = 0
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                count = 1
                for length in file.get_slice(name).get_shape():
                    count *= length
                stored += count
    findings.add("weights", f"{len(shards)} shards, {stored:,} numbers")
    if stored < parameters:
        findings.problem(
            f"{directory}: its *.safetensors hold {stored:,} numbers, the model has {parameters:,}"
        )
