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
from moe_rl.analysis.early_warning import decline
from moe_rl.analysis.run_files import CompactRun, compact
from moe_rl.store import Run, find_runs

BLOCKS = Path(__file__).resolve().parents[1] / "conf" / "evidence.yaml"
SIZES = ("quick", "full")
Overrides = list[str]
Source = tuple[Run, CompactRun]  # a run that others start from: its directory and its numbers


@dataclass(frozen=True)
class Block:
    """One block. `entry`: the command of `experiments` that its sweeps are of; `from_suite`: its runs start
    from the runs of another suite, up to `at_most` collapsed ones with each of `treatments` and as many
    healthy ones with none. `{seed}` in a treatment is the seed of the run that it starts from."""

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
        collapsed, healthy = sources(output / self.from_suite)
        for run, treatments in [
            *((run, self.treatments) for run in collapsed[: self.at_most]),
            *((run, ([],)) for run in healthy[: self.at_most] if collapsed),
        ]:
            models = ",".join(map(str, starts(run)))
            for treatment in treatments:
                changes = [word.format(seed=run[1].seed) for word in treatment]
                changed = {word.split("=")[0] for word in changes}
                kept = [word for word in continued(run) if word.split("=")[0] not in changed]
                yield [*kept, f"model.path={models}", *changes, *where]


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


def sources(folder: Path) -> tuple[list[Source], list[Source]]:
    """The runs of GRPO below `folder` that collapsed by reward, and those that did not, by seed.

    Where two arms' runs of a seed are one to the last digit (R2 and R3 of the same experts) it counts once.
    """
    if not folder.exists():
        return [], []
    pairs = [(run, compact(run, folder.name)) for run in find_runs(folder)]
    kept = [(run, found) for run, found in pairs if found is not None]
    kept = [pair for pair in kept if setting(pair[1], "objective.name") == "grpo"]
    distinct: dict[tuple[float, ...], Source] = {}
    for run, found in sorted(kept, key=lambda pair: (pair[1].seed, pair[1].arm)):
        distinct.setdefault(tuple(found.steps["reward/mean"]), (run, found))
    by_reason = [
        [pair for pair in distinct.values() if pair[1].collapse.reason == why] for why in ("reward", "none")
    ]
    return by_reason[0], by_reason[1]


def starts(source: Source) -> list[Path]:
    """The models to go on from: of a collapsed run the last one before its decline, if there is one, and the
    first one that the rule calls collapsed; of a healthy run those of its middle, if there is one, and end.
    """
    run, found = source
    saved = sorted(int(path.name.removeprefix("step_")) for path in (run.path / "snapshots").glob("step_*"))
    onset, collapse = decline(found), found.collapse.step
    if onset is None or collapse is None:
        earlier, later = [number for number in saved if number <= len(found.steps) // 2], []
    else:
        earlier = [number for number in saved if number < onset]
        later = [number for number in saved if number >= collapse]
    folders = [run.path / "snapshots" / f"step_{max(earlier)}"] if earlier else []
    return [*folders, run.path / "snapshots" / f"step_{min(later)}" if later else run.path / "final"]


def continued(source: Source) -> Overrides:
    """The overrides by which a run was made, as a run of `recovery`."""
    words: Sequence[str] = source[1].header.get("command") or []
    dropped = ("experiment=", "output=", "snapshot_every=", "model.", "cold_start.")
    kept = [word for word in words[3:] if not word.startswith(dropped)]
    return ["experiment=recovery", *kept]
