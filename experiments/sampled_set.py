"""k graded responses to every problem of an evaluation set, one line each in samples.jsonl, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from experiments.nucleus import nucleus
from moe_rl.evaluation import EvaluationSet, Grade, SandboxError
from moe_rl.models import LanguageModel
from moe_rl.store.files import append_line, drop_torn_line, read_lines
from moe_rl.tasks import Problem, prompt_ids, response_text
from moe_rl.training.border import require_encodable
from moe_rl.training.precision import compute_in
from moe_rl.training.rollout import require_fit, sample_responses
from moe_rl.training.seeds import random_stream
from moe_rl.training.sharing import can_share_prompts
from moe_rl.training.time_limit import within

GRADING_S = 20.0  # wall clock, of a grader that runs in this process


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: `k` a problem, `batch` of them at once, from streams named by `seed`."""

    k: int
    temperature: float
    top_p: float
    max_new_tokens: int
    batch: int
    seed: int
    precision: str | None


@dataclass(frozen=True)
class AsTask:
    """The problems as what a check of training reads: a test split."""

    of: EvaluationSet
    train_size = 0

    @property
    def test_size(self) -> int:
        return len(self.of.problems)

    def test(self, index: int) -> Problem:
        return self.of.problems[index]

    train = test


def sample_set(
    lm: LanguageModel, problems: EvaluationSet, sampling: Sampling, path: Path, title: str
) -> dict[str, list[dict[str, Any]]]:
    """The records of every problem by its name, those that a killed evaluation left included.

    Raises ValueError for problems that the tokenizer loses or the model has no room for.
    """
    require_encodable(lm, AsTask(problems))
    prompts = [prompt_ids(lm.tokenizer, problem) for problem in problems.problems]
    require_fit(lm, prompts, sampling.max_new_tokens)
    file = path / "samples.jsonl"
    drop_torn_line(file)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in problems.names}
    for record in read_lines(file):
        rows[record["problem"]].append(record)
    right = sum(record["correct"] for found in rows.values() for record in found)
    done = sum(map(len, rows.values()))
    share = can_share_prompts(lm.model)
    progress = tqdm(
        total=sampling.k * len(problems.names),
        initial=done,
        desc=title,
        unit="sample",
        dynamic_ncols=True,
        disable=None,  # off when not a terminal
    )
    with progress:
        for index, name in enumerate(problems.names):
            there = {record["sample"] for record in rows[name]}
            for first in range(0, sampling.k, sampling.batch):
                numbers = range(first, min(first + sampling.batch, sampling.k))
                if there.issuperset(numbers):
                    continue
                # The whole batch again where a kill cut it: its samples are the same, those there are kept.
                for number, record in zip(
                    numbers, draw(lm, name, prompts[index], sampling, numbers, share), strict=True
                ):
                    if number in there:
                        continue
                    graded = grade(lm, problems, index, record.pop("ids"))
                    record |= {"correct": graded.correct, "detail": graded.detail}
                    append_line(file, record)
                    rows[name].append(record)
                    right, done = right + graded.correct, done + 1
                    progress.set_postfix_str(f"{right / done:.3f} right")
                    progress.update()
    return rows


def draw(
    lm: LanguageModel, name: str, prompt: list[int], sampling: Sampling, numbers: range, share: bool
) -> list[dict[str, Any]]:
    """Records, not graded yet, of the responses `numbers` to a problem."""
    with (
        random_stream("benchmark", sampling.seed, name, numbers.start),
        compute_in(sampling.precision, lm.model.device),
        nucleus(lm.model, sampling.top_p, sampling.temperature),
    ):
        batch = sample_responses(
            lm,
            [prompt] * len(numbers),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            share_prompts=share,
        )
    return [
        {
            "problem": name,
            "sample": number,
            "tokens": len(ids),
            "finished": bool(finished),
            "response": response_text(lm.tokenizer, ids),
            "ids": ids,
        }
        for number, ids, finished in zip(numbers, batch.responses(), batch.finished_B, strict=True)
    ]


def grade(lm: LanguageModel, problems: EvaluationSet, index: int, ids: Sequence[int]) -> Grade:
    """The grade of a response; wrong for one that the grader fails on, or with an id that has no text."""
    if any(token >= len(lm.tokenizer) for token in ids):
        return Grade(False, "a token without text")
    try:
        seconds = GRADING_S if problems.in_process else None
        return within(seconds, problems.grade, index, response_text(lm.tokenizer, ids))
    except (ModuleNotFoundError, SandboxError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # math-verify's own timeout is no Exception
        return Grade(False, f"the grader failed: {type(error).__name__}: {error}")
