"""Evaluate a policy by one of the paper's protocols:

    python -m experiments.evaluate model=MODEL evaluation=aime24 path=aime24.jsonl
    python -m experiments.evaluate model=MODEL evaluation=livecodebench path=lcb.jsonl since=2024-10-01
    python -m experiments.evaluate model=MODEL evaluation=codeforces path=codeforces.jsonl

MODEL is a run directory (its final model, or its last checkpoint), a checkpoint directory or a hub name; the
other options are the fields of `Options` below. A killed evaluation continues with the same command.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config import digest
from experiments.launch import USER_ERRORS
from experiments.policies import load_policy
from experiments.sampled_set import Sampling, sample_set
from moe_rl.evaluation import (
    EvaluationSet,
    Limits,
    SandboxError,
    SandboxUnavailableError,
    elo_rating,
    mean_pass_at_1,
    mean_pass_at_k,
    open_sandbox,
    read_code_set,
    read_math_set,
)
from moe_rl.evaluation.math_set import INSTRUCTION
from moe_rl.models import LanguageModel
from moe_rl.store import Run, RunStore, environment, write_atomic
from moe_rl.store.files import to_json
from moe_rl.training.border import add_weights, require_finite_weights, require_same_content
from moe_rl.training.precision import PRECISIONS

SAMPLES = {"aime24": 32, "livecodebench": 8, "codeforces": 8}  # k of each protocol (GSPO §5.1)
DONE_ERRORS = (*USER_ERRORS, SandboxError, SandboxUnavailableError)


@dataclass
class Options:
    """One evaluation. The paper gives neither temperature nor top-p: 1 and 1 is the policy itself."""

    model: str = MISSING  # run directory, checkpoint directory or hub name
    evaluation: str = MISSING  # aime24, livecodebench or codeforces
    path: str = MISSING  # the problems, a JSONL file
    k: int | None = None  # samples a problem; null: the protocol's
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 2048
    batch: int = 32  # responses sampled together, to one problem
    seed: int = 0
    instruction: str | None = INSTRUCTION  # of aime24, behind each problem; null: none
    since: str | None = None  # of the code sets: contest_date from and until, YYYY-MM-DD
    until: str | None = None
    limits: Limits = field(default_factory=Limits)  # of the code sets, each run of a test
    device: str = "cpu"
    precision: str | None = None  # bfloat16: matrix products under autocast
    threads: int = 1  # torch threads
    trust_remote_code: bool = False
    output: str = "outputs"

    def check(self) -> None:
        """Raise `ValueError` for options out of range."""
        if self.evaluation not in SAMPLES:
            raise ValueError(f"evaluation={self.evaluation!r}: expected {', '.join(SAMPLES)}")
        for name, day in (("since", self.since), ("until", self.until)):
            try:
                date.fromisoformat(day or "2024-01-01")
            except ValueError as error:
                raise ValueError(f"{name}={day}: expected YYYY-MM-DD") from error
        for name in ("k", "max_new_tokens", "batch", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected above 0 and at most 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: expected above 0, to draw different samples")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r}: expected null or bfloat16")
        self.limits.check()


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 done, 1 an error that the last line on stderr names, 130 interrupted."""
    try:
        options = parse(arguments)
        path = directory(options)
        print(f"{os.path.relpath(path)}: {run(options, path)}")
    except KeyboardInterrupt:
        print("\nstopped; the same command continues it", file=sys.stderr)
        return 130
    except DONE_ERRORS as error:
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """The checked options from key=value arguments. Raises `ValueError` in one line."""
    usage = "expected: python -m experiments.evaluate model=MODEL evaluation=NAME path=FILE [key=value ...]"
    bare = [argument for argument in arguments if "=" not in argument]
    if bare:
        raise ValueError(f"{bare[0]!r} is no option; {usage}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_dotlist(list(arguments)))
        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            raise ValueError(f"{missing[0]}= is missing; {usage}")
        options = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{str(error).splitlines()[0]}; {usage}") from error
    assert isinstance(options, Options)
    options.check()
    return options


def plain_config(options: Options) -> dict[str, Any]:
    """What decides the numbers."""
    plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(options))  # type: ignore[assignment]
    del plain["output"]
    return plain | {"k": options.k or SAMPLES[options.evaluation]}


def directory(options: Options) -> Path:
    """outputs/evaluation/<protocol>-<digest>/seed<n>."""
    plain = plain_config(options)
    seed = plain.pop("seed")
    return Path(options.output) / "evaluation" / f"{options.evaluation}-{digest(plain)}" / f"seed{seed}"


def run(options: Options, path: Path) -> str:
    """Sample, grade, summarise; the result in a line."""
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    problems, found = read_set(options)
    lm = load_policy(options.model, device=options.device, trust_remote_code=options.trust_remote_code)
    require_finite_weights(lm.model)
    content = content_of(options, lm)
    if (path / "DONE").exists():
        require_same_content(path, content)
        return "done already: " + report(Run(path).summary)
    with RunStore.open(path, plain_config(options), environment()) as store:
        require_same_content(path, content)
        sampling = Sampling(
            k=options.k or SAMPLES[options.evaluation],
            temperature=options.temperature,
            top_p=options.top_p,
            max_new_tokens=options.max_new_tokens,
            batch=options.batch,
            seed=options.seed,
            precision=options.precision,
        )
        rows = sample_set(lm, problems, sampling, path, title=options.evaluation)
        summary = summarise(options, problems, rows) | found
        write_tables(path, problems, rows, summary)
        store.finish(summary)
    return report(summary)


def content_of(options: Options, lm: LanguageModel) -> str:
    """A hash of the problems and the weights, by which an evaluation knows what it is of."""
    content = hashlib.blake2b(Path(options.path).read_bytes(), digest_size=16)
    add_weights(content, lm.model)
    return content.hexdigest()


def read_set(options: Options) -> tuple[EvaluationSet, dict[str, Any]]:
    """The problems, gradable here; and what the summary says of their grader."""
    file = Path(options.path)
    if not file.is_file():
        raise ValueError(f"path={options.path}: there is no such file")
    if options.evaluation == "aime24":
        math_set = read_math_set(file, options.instruction or "")
        math_set.check()
        return math_set, {}
    sandbox = open_sandbox()
    code_set = read_code_set(
        file,
        sandbox,
        options.limits,
        rated=options.evaluation == "codeforces",
        since=options.since,
        until=options.until,
    )
    return code_set, {"sandbox": sandbox.isolation.tool, "python": sandbox.python_version()}


def summarise(
    options: Options, problems: EvaluationSet, rows: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The numbers of the protocol, from the graded samples of each problem."""
    samples = [len(rows[name]) for name in problems.names]
    correct = [sum(row["correct"] for row in rows[name]) for name in problems.names]
    every = [row for name in problems.names for row in rows[name]]
    k = samples[0]
    found: dict[str, Any] = {
        "evaluation": options.evaluation,
        "model": options.model,
        "problems": len(samples),
        "samples": k,
        "pass@1": vars(mean_pass_at_1(correct, samples)),
        f"pass@{k}": vars(mean_pass_at_k(correct, samples, k)),
        "tokens": sum(row["tokens"] for row in every) / len(every),
        "finished": sum(row["finished"] for row in every) / len(every),
    }
    if problems.ratings:
        found["elo"] = vars(elo_rating(problems.ratings, correct, samples))
    return found


def write_tables(
    path: Path, problems: EvaluationSet, rows: dict[str, list[dict[str, Any]]], summary: dict[str, Any]
) -> None:
    import pandas as pd

    table = pd.DataFrame(
        {
            "problem": problems.names,
            "samples": [len(rows[name]) for name in problems.names],
            "correct": [sum(row["correct"] for row in rows[name]) for name in problems.names],
        }
    )
    table["pass@1"] = table["correct"] / table["samples"]
    if problems.ratings:
        table["rating"] = problems.ratings
    write_atomic(path / "problems.csv", table.to_csv(index=False))
    write_atomic(path / "summary.json", to_json(summary, indent=2) + "\n")


def report(summary: dict[str, Any]) -> str:
    """The result in a line."""
    rate, k = summary["pass@1"], summary["samples"]
    text = (
        f"{summary['evaluation']}, {summary['problems']} problems x {k} samples: mean Pass@1 "
        f"{rate['value']:.4f} [{rate['low']:.4f}, {rate['high']:.4f}] ({rate['interval']})"
    )
    if k > 1:
        text += f", pass@{k} {summary[f'pass@{k}']['value']:.4f}"
    if "elo" in summary:
        elo = summary["elo"]
        text += f", Elo {elo['rating']:.0f} [{elo['low']:.0f}, {elo['high']:.0f}] ({elo['interval']})"
    return text + "; wrote samples.jsonl, problems.csv and summary.json there"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
