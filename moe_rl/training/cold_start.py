"""Supervised warm-up to a target accuracy, computed once per configuration and cached on disk."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from moe_rl.models import LanguageModel
from moe_rl.routing.routers import find_routers, has_routers
from moe_rl.store import StoreError
from moe_rl.store.files import writing
from moe_rl.store.whole import discard, recover, verify, whole_directory
from moe_rl.tasks import Task
from moe_rl.tasks.encode import worked_examples
from moe_rl.training.balance import load_balancing_loss
from moe_rl.training.checkpoint import model_tensors, restore_model
from moe_rl.training.config import ColdStartConfig
from moe_rl.training.evaluate import accuracy, held_out_for_cold_start
from moe_rl.training.progress import steps_bar

WEIGHTS, RESULT = "model.safetensors", "result.json"
EXAMPLES_PER_SEED = 10_000_000  # a seed's examples are its own stretch of the task's stream


class ColdStartError(RuntimeError):
    """The target accuracy was not reached, or the loss was not finite."""


@dataclass(frozen=True)
class ColdStart:
    """`path` of the cached weights, the `steps` they took and their sampled `accuracy` (a fraction)."""

    path: Path
    steps: int
    accuracy: float


def cold_start(
    lm: LanguageModel,
    task: Task,
    config: ColdStartConfig,
    *,
    temperature: float,
    max_new_tokens: int,
    identity: dict[str, Any],
    cache: Path,
    bar: int = 0,
) -> ColdStart:
    """Bring `lm.model` to the cold start, from `cache` if it is there; `identity` names what it depends on.
    `bar` is the line of its progress bar.

    One process computes it while others wait for it. Raises `ColdStartError` when `config.steps` pass without
    the target accuracy; nothing is cached then.
    """
    digest = hashlib.blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=6)
    path = cache / digest.hexdigest()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire(path)
    with lock:
        result = _found(path)
        if result is None:
            steps, reached = _train(lm, task, config, temperature, max_new_tokens, bar)
            result = {"steps": steps, "accuracy": reached, "identity": identity}
            _save(path, lm, result)
        # Always through the file, so that a run that trained it and a run that found it start alike.
        restore_model(lm.model, load_file(path / WEIGHTS))
    return ColdStart(path, result["steps"], result["accuracy"])


def _acquire(path: Path) -> AbstractContextManager[object]:
    """The lock of one cold start, taken; leaving the context releases it."""
    lock = FileLock(path.with_suffix(".lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"another process computes the cold start {path}: waiting for it", file=sys.stderr, flush=True)
        return lock.acquire()


def _found(path: Path) -> dict[str, Any] | None:
    """What result.json says of a cached cold start that is there and whole."""
    recover(path)
    if not path.exists():
        return None
    try:
        verify(path, (WEIGHTS, RESULT))
    except StoreError as error:
        print(f"cold start computed again: {error}", file=sys.stderr, flush=True)
        discard(path)
        return None
    result: dict[str, Any] = json.loads((path / RESULT).read_text(encoding="utf-8"))
    return result


def _save(path: Path, lm: LanguageModel, result: dict[str, Any]) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model_tensors(lm.model).items()}
    with whole_directory(path) as folder:
        save_file(tensors, folder / WEIGHTS)
        (folder / RESULT).write_text(json.dumps(result, indent=2, default=str), encoding="utf-8")


def _train(
    lm: LanguageModel, task: Task, config: ColdStartConfig, temperature: float, max_new_tokens: int, bar: int
) -> tuple[int, float]:
    """Train until an evaluation reaches the target; the steps it took and the accuracy reached."""
    if config.aux_loss_coef and not has_routers(lm.model):
        raise ColdStartError("cold_start.aux_loss_coef balances the load of experts, and this model has none")
    if config.seed is None:
        raise ColdStartError("cold_start.seed=null is the seed of a run, and here is none: give a number")
    lm.model.eval()  # no dropout, as in RL
    tqdm.write(f"cold start: up to {config.steps} steps, to a sampled accuracy of {config.target_accuracy}")
    optimizer = torch.optim.AdamW(
        lm.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
    )
    problems = held_out_for_cold_start(task, config.eval_prompts)
    best = 0.0
    progress = steps_bar("cold start", 0, config.steps, bar, leave=False)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = config.lr * schedule(step, config.warmup_steps, config.steps)
        first = config.seed * EXAMPLES_PER_SEED + (step - 1) * config.batch_size
        loss = _supervised_step(lm, optimizer, task, range(first, first + config.batch_size), config)
        if not math.isfinite(loss):
            progress.close()
            raise ColdStartError(f"cold start: the loss is {loss} at step {step}: lower cold_start.lr")
        progress.set_postfix(loss=f"{loss:.4f}", accuracy=f"{best:.3f}")
        if step % config.eval_every == 0 or step == config.steps:
            reached = accuracy(
                lm, task, problems, temperature=temperature, max_new_tokens=max_new_tokens,
                stream=("cold start", config.seed, step),
            )  # fmt: skip
            best = max(best, reached)
            if reached >= config.target_accuracy:
                progress.close()
                tqdm.write(f"cold start: sampled accuracy {reached:.3f} after {step} steps")
                return step, reached
    raise ColdStartError(
        f"cold start: sampled accuracy {best:.3f} at best in {config.steps} steps on {len(problems)} "
        f"held-out prompts, cold_start.target_accuracy is {config.target_accuracy}: raise cold_start.steps, "
        "lower the target, make the task easier, or start from a checkpoint with cold_start.enabled=false"
    )


def schedule(step: int, warmup: int, total: int) -> float:
    """Factor on the learning rate at 1-based `step`: linear warm-up, then cosine to 0.1 at `total`."""
    if step <= warmup:
        return step / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _supervised_step(
    lm: LanguageModel,
    optimizer: torch.optim.Optimizer,
    task: Task,
    items: Sequence[int],
    config: ColdStartConfig,
) -> float:
    """One update on worked examples; the loss: mean cross-entropy of answer tokens (nats), and balance."""
    examples = [pair for i in items for pair in worked_examples(lm.tokenizer, task.warmup(i))]
    answer_tokens = sum(len(answer) for _, answer in examples)
    size = config.microbatch or len(examples)
    total = 0.0
    optimizer.zero_grad()
    for start in range(0, len(examples), size):
        part = examples[start : start + size]
        loss = supervised_loss(lm, part, config.aux_loss_coef) / answer_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(lm.model.parameters(), 1.0)
    optimizer.step()
    return total


def supervised_loss(
    lm: LanguageModel, examples: Sequence[tuple[list[int], list[int]]], aux_loss_coef: float = 0.0
) -> Tensor:
    """Summed cross-entropy (nats) of the answers' tokens given their prompts; padded on the right.

    `aux_loss_coef` times the load-balancing loss over all tokens is added for each of the answers' tokens.
    """
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids_BT = torch.full((len(examples), width), lm.pad_id)
    labels_BT = torch.full_like(ids_BT, -100)
    mask_BT = torch.zeros_like(ids_BT)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) : end] = torch.tensor(answer)
        mask_BT[row, :end] = 1
    device = lm.model.device
    output = lm.model(
        input_ids=ids_BT.to(device),
        attention_mask=mask_BT.to(device),
        use_cache=False,
        **({"output_router_logits": True} if aux_loss_coef else {}),  # unknown to dense models
    )
    loss = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten().to(device), reduction="sum"
    )
    if aux_loss_coef:
        top_k = [router.top_k for router in find_routers(lm.model)]
        balance = load_balancing_loss(output.router_logits, top_k, mask_BT.to(device))
        loss = loss + aux_loss_coef * sum(len(answer) for _, answer in examples) * balance
    return loss
