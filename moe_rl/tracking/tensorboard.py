"""TensorBoard: event files in the run directory, `tensorboard --logdir outputs/<experiment>`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from moe_rl.store.reader import Status
from moe_rl.tracking.rows import Row
from moe_rl.tracking.tracker import TrackedRun


@dataclass
class TensorBoard:
    """Scalars over training steps, in single precision (TensorBoard's own); the configuration is a text."""

    _writer: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        try:
            import tensorboard  # noqa: F401  what torch's writer needs, and TensorBoard itself
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'tracking=tensorboard needs the package tensorboard: pip install "moe_rl[tensorboard]"'
            ) from error

    def open(self, run: TrackedRun) -> int:
        """A new event file, which begins by taking back what earlier files of the run say: all is sent again.

        The end of an earlier file may be missing or ahead of the run that resumes.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder), purge_step=0)
        self._writer.add_text("config", "```yaml\n" + yaml.safe_dump(run.config, sort_keys=False) + "```", 0)
        return -1

    def log(self, step: int, row: Row) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # its own period is two minutes, of which a kill takes all

    def close(self, status: Status) -> None:
        self._writer.close()
