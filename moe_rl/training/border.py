"""What is checked once, before any training time is spent."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective
from moe_rl.objectives.geometric import GMPO
from moe_rl.objectives.preference import DPO, Contrastive
from moe_rl.objectives.sequence_level import GSPO, GSPOToken
from moe_rl.routing.routers import has_routers
from moe_rl.store import StoreError, write_atomic
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import prompt_ids, said_ids, worked_examples
from moe_rl.training.checkpoint import model_tensors
from moe_rl.training.config import TrainConfig
from moe_rl.training.grading import GuardedTask

CHECKED = 4096  # problems a split; a few seconds at most


def check_together(objective: Objective, config: TrainConfig) -> None:
    """Raise `ValueError` for an objective whose comparisons would cross prompts, or that corrects twice."""
    unit = 1
    if isinstance(objective, DPO):
        unit = 2
        if config.rollout.responses % 2:
            raise ValueError(
                f"rollout.responses={config.rollout.responses}: dpo pairs neighbouring responses of a "
                "prompt, so their number must be even"
            )
    if isinstance(objective, Contrastive):
        unit = objective.group_size
        if unit != config.rollout.responses:
            raise ValueError(
                f"objective.group_size={unit} and rollout.responses={config.rollout.responses}: contrastive "
                "compares the responses of a prompt, so they must be equal"
            )
    if config.optim.microbatch is not None and config.optim.microbatch % unit:
        raise ValueError(
            f"optim.microbatch={config.optim.microbatch}: {type(objective).__name__} compares {unit} "
            "neighbouring responses, so a micro-batch must hold a multiple of them"
        )
    weighs_responses = isinstance(objective, GSPO | GMPO | DPO | Contrastive)
    weighs_responses &= not isinstance(objective, GSPOToken)
    if config.advantages_by == "turn" and (weighs_responses or "values_BT" in objective.needs):
        raise ValueError(
            f"advantages_by=turn: {type(objective).__name__} "
            + ("weighs a response as a whole" if weighs_responses else "takes its advantages from values")
            + ", so its turns cannot have advantages of their own: use objective=gspo_token (GSPO Eq. 13), a "
            "token-level one such as grpo, or advantages_by=response"
        )
    if config.mismatch.correction is not None and "sampler_logp_BT" in objective.needs:
        raise ValueError(
            f"mismatch.correction={config.mismatch.correction}: {type(objective).__name__} weighs by π/μ "
            "already, the correction would count the mismatch twice"
        )
    changed = config.intervention.expert_changes
    if changed is not None and {"values_BT", "router_shift_BT"} & set(objective.needs):
        raise ValueError(
            f"intervention.expert_changes={changed}: {type(objective).__name__} compares more with π_old "
            "than log-probabilities, and only these follow the swapped experts"
        )


def check_turns(task: Task, config: TrainConfig) -> None:
    """Raise `ValueError` for options that do not go with the number of the task's turns."""
    turns = len(task.train(0).turns)
    if turns == 1 and config.advantages_by == "turn":
        raise ValueError("advantages_by=turn: the task has one turn, so use advantages_by=response")
    for name, value in (("ahead", config.rollout.ahead), ("overlong_cache", config.rollout.overlong_cache)):
        if turns > 1 and value:
            raise ValueError(f"rollout.{name}={value} is of responses of one turn, and the task has {turns}")


def check_one_batch(config: TrainConfig) -> None:
    """Raise `ValueError` for options of training that a measurement on one rollout batch has no use for."""
    if config.rollout.ahead:
        raise ValueError(
            f"rollout.ahead={config.rollout.ahead}: one rollout batch is measured, which has no older weights"
        )
    if not config.rollout.recompute:
        raise ValueError("rollout.recompute=false: measured is the old-policy pass that this leaves out")


def check_model(policy: nn.Module, objective: Objective, config: TrainConfig) -> None:
    """Raise `ValueError` for options that ask a dense model for its routing."""
    if has_routers(policy):
        return
    if config.replay.source is not None:
        raise ValueError(f"replay.source={config.replay.source}: the model has no MoE layers to replay")
    if config.optim.freeze_routers:
        raise ValueError("optim.freeze_routers=true: the model has no routers to freeze")
    if config.optim.aux_loss_coef:
        raise ValueError(
            f"optim.aux_loss_coef={config.optim.aux_loss_coef}: the model has no experts to balance"
        )
    if config.intervention.expert_changes is not None:
        raise ValueError(
            f"intervention.expert_changes={config.intervention.expert_changes}: the model has no experts"
        )
    if "router_shift_BT" in objective.needs:
        raise ValueError(
            f"objective {type(objective).__name__}: the model has no routers to measure a shift of"
        )


def require_finite_weights(model: nn.Module) -> None:
    """Raise `ValueError` that names the first parameter with a NaN or infinity."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"model: {name} holds NaN or infinite weights: the checkpoint is damaged")


def require_gradable(task: Task, timeout_s: float | None, problems: int = 8) -> None:
    """Raise `ValueError` for a grader that fails on the task's own answers, or pays for none of them."""
    guarded = GuardedTask(task, timeout_s)
    own = [p for p in map(task.train, range(min(problems, task.train_size or problems))) if p.answer]
    rewards = [guarded.reward(problem, problem.answer) for problem in own]
    _, errors = guarded.take_errors()
    if errors:
        raise ValueError(f"the grader fails on the task's own answer: {' '.join(errors[0]['error'].split())}")
    if own and not any(rewards):
        raise ValueError(f"the grader pays 0 for the task's own answers, the first {own[0].answer!r}")


def some_problems(task: Task) -> Iterator[tuple[str, int, Problem]]:
    """(split, index, problem) of a finite task up to `CHECKED` a split, of an endless one the first few."""
    for split, draw, size in (("train", task.train, task.train_size), ("test", task.test, task.test_size)):
        for index in range(16 if size is None else min(size, CHECKED)):
            yield split, index, draw(index)


def require_room(lm: LanguageModel, task: Task, config: TrainConfig) -> None:
    """Raise `ValueError` for a prompt that with its response, or worked answer, exceeds the context."""
    limit = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        return
    for split, index, problem in some_problems(task):
        prompt, response = len(prompt_ids(lm.tokenizer, problem)), config.rollout.longest
        response *= len(problem.turns)
        response += sum(len(said_ids(lm.tokenizer, turn)) for turn in problem.later)
        if config.cold_start.enabled and split == "train":
            before, answer = worked_examples(lm.tokenizer, problem)[-1]
            response = max(response, len(before) + len(answer) - prompt)
        if prompt + response > limit:
            raise ValueError(
                f"{split} problem {index} has a prompt of {prompt} tokens, with a response of {response} "
                f"longer than the model's max_position_embeddings={limit}: drop long problems from the task "
                f"({problem.prompt[:60]!r}…) or lower rollout.max_new_tokens={config.rollout.max_new_tokens}"
            )


def require_encodable(lm: LanguageModel, task: Task) -> None:
    """Raise `ValueError` for a tokenizer that the task's prompts do not survive.

    A checkpoint directory without tokenizer files can load as an empty tokenizer, all text to nothing.
    """
    for _, _, problem in some_problems(task):
        prompt = "".join(turn.prompt for turn in problem.turns)
        try:
            ids = prompt_ids(lm.tokenizer, problem)
            ids += [token for turn in problem.later for token in said_ids(lm.tokenizer, turn)]
            kept = lm.tokenizer.decode(ids)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(
                f"the model's tokenizer cannot encode the task's prompt {prompt!r}: {error}"
            ) from error
        missing = sorted({character for character in prompt if not character.isspace()} - set(kept))
        if not ids or missing:
            raise ValueError(
                f"the model's tokenizer loses {missing or 'all'} of the task's prompt {prompt!r}: it does "
                "not fit the task, or the checkpoint directory has no tokenizer of its own"
            )


def content_digest(lm: LanguageModel, task: Task) -> str:
    """What a run starts from, by content: weights, tokenizer, first problems of every split.

    A path may hold other weights or an edited file the next day under the same configuration.
    """
    digest = hashlib.blake2b(digest_size=16)
    add_weights(digest, lm.model)
    digest.update(json.dumps(sorted(lm.tokenizer.get_vocab().items())).encode())
    for split in (task.train, task.test, task.warmup):
        for index in range(64):
            with contextlib.suppress(IndexError, ValueError):  # a short test split, a family without answers
                problem = split(index)
                for turn in problem.turns:
                    digest.update(f"{turn.prompt}\0{turn.answer}\0".encode())
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """32 hex digits of every weight, by name and bit."""
    digest = hashlib.blake2b(digest_size=16)
    add_weights(digest, model)
    return digest.hexdigest()


def add_weights(digest: hashlib.blake2b, model: nn.Module) -> None:
    """Take every weight into a hash, by name and bit."""
    for name, tensor in sorted(model_tensors(model).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())


def require_same_content(directory: Path, content: str) -> None:
    """Raise `StoreError` when a run is continued on other weights, tokenizer or problems than it began on."""
    file = directory / "content.txt"
    if not file.exists():
        write_atomic(file, content + "\n")
    elif file.read_text(encoding="utf-8").strip() != content:
        raise StoreError(
            f"{directory} began with other weights, another tokenizer or other problems under the same "
            "configuration (a checkpoint or data file has changed since): use another output folder"
        )
