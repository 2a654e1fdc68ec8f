"""trackio: a local SQLite file per project (TRACKIO_DIR), `trackio show --project moe_rl`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_rl.store.reader import Status
from moe_rl.tracking.rows import Row
from moe_rl.tracking.tracker import TrackedRun


@dataclass
class Trackio:
    """Where it writes, and whether to a Space, is trackio's own: TRACKIO_DIR, TRACKIO_SPACE_ID."""

    project: str = "moe_rl"
    _run: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._package()

    def _package(self) -> Any:
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'tracking=trackio needs the package trackio: pip install "moe_rl[trackio]"'
            ) from error
        return trackio

    def open(self, run: TrackedRun) -> int:
        self._run = self._package().init(
            project=self.project,
            name=f"{run.name} {run.id}",  # trackio resumes by name
            group=run.group,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # of the machine, not of the run
        )
        return int(self._run._next_step) - 1  # no public name for the last step, local and remote

    def log(self, step: int, row: Row) -> None:
        self._run.log(row, step=step)

    def close(self, status: Status) -> None:
        self._run.finish()
