"""Weights & Biases, online or offline (`wandb sync` sends an offline run later)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_rl.store.reader import Status
from moe_rl.tracking.rows import Row
from moe_rl.tracking.tracker import TrackedRun

CONNECT_S = 30.0  # then the run goes on without
UPLOAD_S = 120.0  # a run that is done does not wait longer for a network; `wandb sync` sends the rest


@dataclass
class Wandb:
    """`mode`: online, offline, or None for what WANDB_MODE and the package's own settings say.

    An offline run lies below the run's `tracking/wandb/`. After a resumption there are two; the later holds
    the whole run, because nobody can ask the server what it has.
    """

    project: str = "moe_rl"
    mode: str | None = None
    _run: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.mode not in (None, "online", "offline"):
            raise ValueError(f"tracking.mode={self.mode}: expected online, offline or null")
        self._package()

    def _package(self) -> Any:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'tracking=wandb needs the package wandb: pip install "moe_rl[wandb]"'
            ) from error
        return wandb

    def open(self, run: TrackedRun) -> int:
        wandb = self._package()
        self._run = wandb.init(
            project=self.project,
            mode=self.mode,
            id=run.id,
            name=run.name,
            group=run.group,
            job_type=run.experiment,
            config=run.config,
            dir=str(run.folder),
            resume="allow",
            reinit="create_new",  # a sweep has several runs in one process
            settings=wandb.Settings(
                silent=True,  # our own terminal output says what happens
                console="off",
                login_timeout=60.0,  # for a key typed at the terminal; a sweep nobody watches goes on
                init_timeout=CONNECT_S,
                finish_timeout=UPLOAD_S,
                finish_timeout_raises=True,
            ),
        )
        return -1 if self._run.offline else self._run.starting_step - 1

    def log(self, step: int, row: Row) -> None:
        self._run.log(row, step=step)

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)
