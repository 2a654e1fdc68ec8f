"""The blocks of the evidence, from `conf/evidence.yaml`, and the sweeps of training that each consists of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from moe_rl.analysis.comparison import setting
from moe_rl.analysis.run_files import CompactRun, compact
from moe_rl.store import Run, find_runs

BLOCKS = Path(__file__).resolve().parents[1] / "conf" / "evidence.yaml"
SIZES = ("quick", "full")
Overrides = list[str]


@dataclass(frozen=True)
class Block:
    """One block. `entry`: the command of `experiments` that its sweeps are of; `from_suite`: its runs start
    from the collapsed runs of another suite."""

    name: str
    suite: str
    minutes: int
    entry: str = "train"
    seeds: tuple[int, ...] = ()
    sweeps: tuple[Overrides, ...] = ()
    from_suite: str | None = None
    at_most: int = 0
    treatments: tuple[Overrides, ...] = ()

    def commands(self, output: Path) -> Iterator[Overrides]:
        """The overrides of every sweep, pairs of seeds outermost: a sweep has a run for either core."""
        where = [f"output={output}"]
        if self.from_suite is None:
            for first in range(0, len(self.seeds), 2):
                seeds = ",".join(map(str, self.seeds[first : first + 2]))
                for sweep in self.sweeps:
                    yield [*sweep, f"seed={seeds}", *where]
            return
        for run in collapsed_runs(output / self.from_suite, self.at_most):
            models = ",".join(map(str, starts(run)))
            for treatment in self.treatments:
                yield [*continued(run), f"model.path={models}", *treatment, *where]


def read_blocks(size: str) -> dict[str, Block]:
    """The blocks of a size by name; those without anything to run at it are left out."""
    found = {}
    for name, given in yaml.safe_load(BLOCKS.read_text(encoding="utf-8")).items():
        options: dict[str, Any] = {key: value for key, value in given.items() if not key.startswith("quick")}
        if size == "quick":
            options["seeds"] = given.get("quick_seeds", [])
            options["sweeps"] = [[*sweep, "size=quick"] for sweep in given.get("quick", [])]
            options["at_most"] = given.get("quick_at_most", 0)
            options["treatments"] = given.get("quick_treatments", [])
        for key in ("seeds", "sweeps", "treatments"):
            options[key] = tuple(options.get(key, ()))
        block = Block(name, **options)
        if block.sweeps or block.treatments:
            found[name] = block
    return found


def runs_of(sweep: Overrides) -> list[Overrides]:
    """The overrides of each run of a sweep, in the words that the run's own command has."""
    words: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(sweep):
        key = override.get_key_element()
        values = override.sweep_string_iterator() if override.is_sweep_override() else None
        words[key] = [f"{key}={value}" for value in values or [override.get_value_element_as_str()]]
    return [list(chosen) for chosen in itertools.product(*words.values())]


def collapsed_runs(folder: Path, at_most: int) -> list[tuple[Run, CompactRun]]:
    """The first runs of GRPO below `folder` that collapsed by reward, so that they have a last model.

    Where two arms' runs of a seed are one to the last digit (R2 and R3 of the same experts) it counts once.
    """
    if not folder.exists():
        return []
    pairs = [(run, compact(run, folder.name)) for run in find_runs(folder)]
    kept = [(run, found) for run, found in pairs if found is not None and found.collapse.reason == "reward"]
    kept = [pair for pair in kept if setting(pair[1], "objective.name") == "grpo"]
    distinct: dict[tuple[float, ...], tuple[Run, CompactRun]] = {}
    for run, found in sorted(kept, key=lambda pair: (pair[1].seed, pair[1].arm)):
        distinct.setdefault(tuple(found.steps["reward/mean"]), (run, found))
    return list(distinct.values())[:at_most]


def starts(pair: tuple[Run, CompactRun]) -> list[Path]:
    """The collapsed model, and the last snapshot from well before the collapse, if there is one."""
    run, found = pair
    # the rule sees a collapse only after this many steps of it
    late = int(setting(found, "collapse.window")) + int(setting(found, "collapse.patience"))
    latest = (found.collapse.step or 0) - late
    saved = [int(path.name.removeprefix("step_")) for path in (run.path / "snapshots").glob("step_*")]
    earlier = [number for number in saved if number <= latest]
    folders = [run.path / "final"]
    if earlier:
        folders.append(run.path / "snapshots" / f"step_{max(earlier)}")
    return folders


def continued(pair: tuple[Run, CompactRun]) -> Overrides:
    """The overrides by which a run was made, as a run of `recovery`."""
    words: Sequence[str] = pair[1].header.get("command") or []
    dropped = ("experiment=", "output=", "snapshot_every=", "model.", "cold_start.")
    kept = [word for word in words[3:] if not word.startswith(dropped)]
    return ["experiment=recovery", *kept]
