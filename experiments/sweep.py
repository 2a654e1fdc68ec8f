"""The end of a sweep, whichever launcher ran it: the runs that failed, their directories, and the exit code.

Launchers differ in what a failing job does to the others and to the command: Hydra's own goes on and shows
one traceback, joblib breaks off when a worker is killed, submitit writes what a job said to a file. So a job
of a sweep never raises; it leaves a note, and the command compares the sweep's runs with their DONE.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

NOTES = ".failed"  # below the sweep's directory
INTERRUPTED = 130
# launcher=: its Hydra plugin, and the extra that brings it
PLUGINS = {
    "joblib": ("hydra_joblib_launcher", "sweep"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "submitit_slurm": ("hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_ray_launcher", "ray"),
}
# The sweeps of the command that runs: Hydra makes its callbacks by itself, so they cannot be handed a list.
SWEEPS: ContextVar[list[Sweep] | None] = ContextVar("sweeps", default=None)


@dataclass(frozen=True)
class Sweep:
    """A grid of overrides and what composes them."""

    config: DictConfig
    loader: ConfigLoader

    def runs(self) -> list[Path]:
        """The directory of every run, in the sweep's order."""
        hydra = self.config.hydra
        words = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
        words += list(hydra.overrides.task)
        parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(words)
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        found = []
        for overrides in jobs:
            sweep = self.loader.load_sweep_config(self.config, overrides).hydra.sweep
            found.append(Path(sweep.dir) / sweep.subdir)
        return found

    def failures(self, runs: list[Path]) -> dict[Path, str]:
        """Why a run is not done, by its directory; the notes are read once."""
        folder, found = Path(self.config.hydra.sweep.dir), {}
        for path in runs:
            note = note_of(folder, path)
            if note.exists():
                found[path] = note.read_text(encoding="utf-8")
                note.unlink()
            elif not (path / "DONE").exists():
                found[path] = "did not finish: killed, or not started; the same command continues it"
        with contextlib.suppress(OSError):
            (folder / NOTES).rmdir()
        return found


class RememberSweep(Callback):
    """Hands the sweep that begins to `lists_failures`."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        sweeps = SWEEPS.get()
        if sweeps is not None:
            sweeps.append(Sweep(config, GlobalHydra.instance().config_loader()))


def lists_failures(main: Callable[[], None]) -> Callable[[], None]:
    """Around a Hydra command: a sweep ends with the list of its failed runs, and then exits with 1."""

    @functools.wraps(main)
    def listing() -> None:
        require_launcher(sys.argv)
        with remembered() as sweeps:
            try:
                main()
            except SystemExit as stop:
                if stop.code != INTERRUPTED:  # a launcher that broke off, or a config that does not compose
                    with contextlib.suppress(HydraException, OmegaConfBaseException):
                        list_failures(sweeps)
                raise
            if list_failures(sweeps):
                sys.exit(1)

    return listing


def require_launcher(arguments: list[str]) -> None:
    """End with one line for a launcher that is not installed; Hydra composes it for a single run as well."""
    given = [word.removeprefix("launcher=") for word in arguments if word.startswith("launcher=")]
    launcher = given[-1] if given else "joblib"
    plugin, extra = PLUGINS.get(launcher, (None, None))
    if plugin is None:
        return  # in Hydra's core, or unknown, which Hydra says
    try:
        found = importlib.util.find_spec(f"hydra_plugins.{plugin}")
    except ModuleNotFoundError:  # no plugin at all
        found = None
    if found is None:
        needs = f'launcher={launcher} needs the package {plugin}: pip install "moe_rl[{extra}]"'
        sys.exit(f"failed: {needs}, or give launcher=basic")


def list_failures(sweeps: list[Sweep]) -> int:
    """Print the runs that are not done; how many."""
    failures = 0
    for sweep in sweeps:
        runs = sweep.runs()
        failed = sweep.failures(runs)
        if failed:
            print(f"{len(failed)} of {len(runs)} runs failed:", file=sys.stderr)
        for path, reason in failed.items():
            print(f"  {os.path.relpath(path)}: {reason}", file=sys.stderr)
        failures += len(failed)
    return failures


@contextlib.contextmanager
def remembered() -> Iterator[list[Sweep]]:
    """The list that `RememberSweep` fills meanwhile."""
    sweeps: list[Sweep] = []
    token = SWEEPS.set(sweeps)
    try:
        yield sweeps
    finally:
        SWEEPS.reset(token)


def note_of(folder: Path, path: Path) -> Path:
    """Where a run of the sweep in `folder` says why it failed: its own directory may be gone, or in use."""
    return folder / NOTES / "__".join(path.resolve().relative_to(folder.resolve()).parts)
