"""What a tracker is, and what it is told of a run."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_rl.store import Run, write_atomic
from moe_rl.store.reader import Status
from moe_rl.tracking.rows import Row


@dataclass(frozen=True)
class TrackedRun:
    """How trackers name a run: seeds of one arm and configuration are a group.

    `id` is drawn with the run directory and kept in it, so that a resumed run goes on in the same tracker
    run while one that was deleted and made again gets a new one. `folder` is for what a tracker keeps.
    """

    id: str
    name: str  # "grpo+replay seed 0"
    group: str  # "grpo+replay-a1bfd5f4", the directory that the seeds share
    experiment: str
    config: dict[str, Any]
    folder: Path  # <run>/tracking

    @classmethod
    def of(cls, path: Path) -> TrackedRun:
        """The run in a directory. Raises StoreError where it cannot be read or its id not be kept."""
        run, folder = Run(path), path / "tracking"
        folder.mkdir(exist_ok=True)
        id_file = folder / "id"
        if not id_file.exists():
            write_atomic(id_file, secrets.token_hex(4) + "\n")
        return cls(
            id=id_file.read_text(encoding="utf-8").strip(),
            name=f"{run.arm} seed {run.seed}",
            group=path.resolve().parent.name,
            experiment=str(run.config.get("experiment", "")),
            config=run.config,
            folder=folder,
        )


class Tracker(Protocol):
    """One tracker; its methods raise what the package raises. A frozen dataclass's fields are its options."""

    def open(self, run: TrackedRun) -> int:
        """Begin, or go on with, the tracker's run; the last step that it holds, -1 where it holds none."""

    def log(self, step: int, row: Row) -> None:
        """Show one step, above all before."""

    def close(self, status: Status) -> None:
        """End the tracker's run as done, failed or unfinished, with everything written."""
