"""One small file per finished run: what figures and claims are made from, long after its directory is gone.

A file is `<folder>/<suite>/<arm>-<config hash>-seed<n>.csv`: a first line `# {...}` with everything that
names the run (suite, configuration, command, versions, commit, how it ended), then one row a step with the
columns below; row 0 is the cold start and holds evaluations alone.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.analysis.collapse import Collapse
from moe_rl.analysis.comparison import collapse_of, ended_as_collapsed
from moe_rl.analysis.readable import require_readable
from moe_rl.store import Run, StoreError, write_atomic
from moe_rl.store.files import writing

COLUMNS = (
    "reward/mean", "reward/std", "reward/zero_std_groups", "reward/turn1", "reward/turn2", "response/length",
    "response/length_better", "response/length_worse", "response/truncated", "entropy", "loss", "aux_loss",
    "grad_norm", "grad_norm_max", "lr", "updates/skipped", "kl/k1", "kl/k3",
    "ratio/token_std", "ratio/token_min", "ratio/token_max", "ratio/token_log_sq",
    "ratio/sequence_std", "ratio/sequence_min", "ratio/sequence_max",
    "clip_frac/token", "clip_frac/sequence", "clip_frac/token_signblind",
    "drift/first", "drift/old", "drift/step", "replay/overridden", "intervention/experts",
    "mismatch/kl_k3", "mismatch/kl_k3_older", "mismatch/kl_k3_current", "mismatch/logp_abs_diff_mean",
    "mismatch/experts", "rollout/older_tokens", "router_shift/gamma_mean", "load/max_violation",
    "time/rollout", "time/old_policy", "time/total",
)  # fmt: skip
EVALS = (
    "eval/greedy", "eval/sampled", "eval/greedy_turn1", "eval/greedy_turn2", "eval/sampled_turn1",
    "eval/sampled_turn2",
)  # fmt: skip
TRAINED, UNCLIPPED = "tokens/trained", "tokens/unclipped"


@dataclass(frozen=True)
class Named:
    """What names a committed table: its header, with suite, arm, seed, config_hash and config."""

    header: dict[str, Any]

    @property
    def suite(self) -> str:
        return str(self.header["suite"])

    @property
    def arm(self) -> str:
        return str(self.header["arm"])

    @property
    def seed(self) -> int:
        return int(self.header["seed"])

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.header["config"]
        return found

    @property
    def id(self) -> str:
        """<suite>/<arm>-<config hash>-seed<n>."""
        return f"{self.suite}/{self.arm}-{self.header['config_hash']}-seed{self.seed}"


@dataclass(frozen=True)
class CompactRun(Named):
    """A finished run, from its file.

    header: suite, arm, seed, config_hash, status ("done" or "collapsed"), collapse (step, censored_at,
    reason), starting_weights (a digest; null where DONE does not say), config, command, versions, git_commit,
    git_dirty.  table: column `step` and those of COLUMNS and
    EVALS that the run logged, with `tokens/trained` and `tokens/unclipped` of each step (response tokens in
    its updates, once an epoch; of these, the ones whose gradient was not clipped away).
    """

    table: pd.DataFrame

    @property
    def collapse(self) -> Collapse:
        return Collapse(**self.header["collapse"])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a rollout batch."""
        return self.table[self.table["reward/mean"].notna()].reset_index(drop=True)

    def evaluations(self, column: str) -> pd.DataFrame:
        """step and value of every evaluation, step 0 first; empty where there was none."""
        if column not in self.table:
            return pd.DataFrame(columns=["step", "value"])
        rows = self.table[self.table[column].notna()]
        return pd.DataFrame({"step": rows["step"], "value": rows[column]}).reset_index(drop=True)


def compact(run: Run, suite: str) -> CompactRun | None:
    """The compact form of a run directory; None for a run that has not ended, or failed in any way but by
    collapsing. Raises StoreError for a damaged one."""
    collapsed = ended_as_collapsed(run)
    if run.status != "done" and not collapsed:
        return None
    steps, evals = run.steps(), run.evals()
    require_readable(run, steps, run.updates(), evals)
    if not len(steps):  # collapsed before the first step was logged
        return None
    outcome, environment = collapse_of(run, steps), run.environment
    header = {
        "suite": suite,
        "arm": run.arm,
        "seed": run.seed or 0,
        "config_hash": config_hash(run.config),
        "status": "collapsed" if collapsed else "done",
        "collapse": {
            "step": outcome.step,
            "censored_at": outcome.censored_at,
            "reason": outcome.reason,
        },
        "starting_weights": run.summary.get("starting_weights"),
        "config": run.config,
        **{key: environment.get(key) for key in ("command", "versions", "git_commit", "git_dirty")},
    }
    table = steps[["step", *(column for column in COLUMNS if column in steps)]].copy()
    table[TRAINED] = _trained_tokens(steps, run.config)
    if "clip_frac/token" in steps:
        table[UNCLIPPED] = (table[TRAINED] * (1 - steps["clip_frac/token"])).round()
    if len(evals):
        found = evals[["step", *(column for column in EVALS if column in evals)]]
        table = table.merge(found, on="step", how="outer").sort_values("step", ignore_index=True)
    return CompactRun(header, table)


def config_hash(config: dict[str, Any]) -> str:
    """Eight hex digits of a run's configuration without its seed, as in the name of its directory."""
    plain = json.dumps({key: value for key, value in config.items() if key != "seed"}, sort_keys=True)
    return hashlib.blake2b(plain.encode(), digest_size=4).hexdigest()


def _trained_tokens(steps: pd.DataFrame, config: dict[str, Any]) -> pd.Series:
    rollout, optim = config.get("rollout") or {}, config.get("optim") or {}
    responses = rollout.get("prompts", 1) * rollout.get("responses", 1) * optim.get("epochs", 1)
    if "response/length" not in steps:
        return pd.Series(np.nan, index=steps.index)
    return (steps["response/length"] * responses).round()


def write_compact(run: CompactRun, folder: Path) -> Path:
    """Write the run's file below `folder`, whole or not at all; numbers keep six significant digits."""
    path = folder / f"{run.id}.csv"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    rows = run.table.to_csv(index=False, float_format="%.6g")
    write_atomic(path, f"# {json.dumps(run.header, sort_keys=True)}\n{rows}")
    return path


def read_compact(path: Path) -> CompactRun:
    """Read a file that `write_compact` wrote. Raises StoreError, naming it, for any other."""
    try:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        header = json.loads(first.removeprefix("# "))
        run = CompactRun(header, pd.read_csv(io.StringIO(rest)))
        if f"{run.id}.csv" != f"{path.parent.name}/{path.name}":
            raise ValueError(f"it says that it is {run.id}")
        _ = run.collapse, run.config, run.steps
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is no table of a run: {' '.join(str(error).split())}") from error
    return run


def commands_in(folder: Path) -> set[tuple[str, ...]]:
    """The overrides of the command behind every table of a run or a measurement in `folder`."""
    found = set()
    for path in folder.glob("*.csv"):
        try:
            header = json.loads(path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
            found.add(tuple(header["command"])[3:])  # after python -m <module>
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} does not say which command made it: {error}") from error
    return found


def read_all(folder: Path, defaults: Mapping[str, Any] | None = None) -> list[CompactRun]:
    """Every run below `folder`, sorted by suite, arm and seed.

    `defaults`: of options that tables made before there were these lack, so that their runs and later ones
    are of one arm. Raises StoreError as `require_one_start`.
    """
    runs = [read_compact(path) for path in sorted(folder.glob("*/*.csv"))]
    for run in runs:
        fill(run.config, defaults or {})
    require_one_start(runs)
    return sorted(runs, key=lambda run: (run.suite, run.arm, run.header["config_hash"], run.seed))


def fill(config: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Give the configuration what it lacks of the defaults, in the sections that it has."""
    for key, value in defaults.items():
        if key not in config:
            config[key] = value
        elif isinstance(value, Mapping) and isinstance(config[key], dict):
            fill(config[key], value)


def require_one_start(runs: Iterable[CompactRun]) -> None:
    """Raise StoreError where two runs of a suite and seed have one cold start by their configuration, and
    started from different weights: they were made on different machines, and are no pair."""
    first: dict[str, CompactRun] = {}
    for run in runs:
        if run.header.get("starting_weights") is None:
            continue
        start = {key: run.config.get(key) for key in ("model", "task", "cold_start", "device", "threads")}
        rollout = run.config.get("rollout") or {}
        start |= {key: rollout.get(key) for key in ("temperature", "max_new_tokens")}
        key = json.dumps([run.suite, run.seed, start], sort_keys=True)
        other = first.setdefault(key, run)
        if other.header["starting_weights"] != run.header["starting_weights"]:
            raise StoreError(
                f"{other.id} and {run.id} would be paired, but their cold starts differ: another CPU comes "
                "to another one. Make all runs of a seed on one machine: remove one of the two tables and "
                "run its block again there"
            )


def export(runs: Iterable[Run], suite: str, folder: Path) -> list[Path]:
    """Write the file of every run that has ended; the paths written."""
    ended = [found for run in runs if (found := compact(run, suite)) is not None]
    return [write_compact(run, folder) for run in ended]
