"""The typed schema behind `conf/measure_drift.yaml`: a training run's, and how the drift is measured."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from experiments.config import Config, digest, run_config, train_config
from moe_rl.laboratory.protocol import DriftOptions
from moe_rl.routing.stream import MANIFEST


@dataclass
class TraceFiles:
    """What other engines' files do not say of themselves; see `experiments.inspect_trace`."""

    model: str | None = None  # directory or config.json of the model; no weights are read
    layers: int | None = None  # or its sizes: decoder layers, dense ones included
    experts: int | None = None
    top_k: int | None = None
    moe_layers: list[int] | None = None  # null: all
    format: str | None = None  # of a batch in one array
    prompt_tokens: int | None = None  # columns of the (padded) prompt; null: rows are not told apart


@dataclass
class DriftConfig(Config):
    """One measurement: of a model, or with `old` and `new` of two recorded traces of the same tokens."""

    drift: DriftOptions = field(default_factory=DriftOptions)
    old: str | None = None
    new: str | None = None
    trace_files: TraceFiles = field(default_factory=TraceFiles)

    @property
    def offline(self) -> bool:
        """Whether traces are compared, without a model. Raises `ValueError` for one trace alone."""
        if (self.old is None) != (self.new is None):
            raise ValueError("old=FILE and new=FILE go together")
        return self.old is not None


def drift_config(cfg: DictConfig) -> DriftConfig:
    """The checked options. Raises `ValueError` for those that contradict each other."""
    config = train_config(cfg)
    assert isinstance(config, DriftConfig)
    config.drift.check()
    return config


def stored_config(cfg: DictConfig) -> dict[str, Any]:
    """What names a measurement: everything that decides its numbers, for traces their content."""
    plain = run_config(cfg)
    files = {name: plain.pop(name) for name in ("old", "new")}
    if files["old"] is None and files["new"] is None:
        del plain["trace_files"]
        return plain
    content = {name: content_of(Path(file)) for name, file in files.items() if file is not None}
    options = {key: plain[key] for key in ("experiment", "trace_files")}
    options["drift"] = {"resamples": plain["drift"]["resamples"]}
    return options | files | {"content": content, "arm": "traces"}


def content_of(path: Path) -> str:
    """A hash of a trace file, or of a stream's files; empty where there is none."""
    files = [path] if path.is_file() else [*sorted(path.glob("*.safetensors")), path / MANIFEST]
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest() if any(file.is_file() for file in files) else ""


def run_name(_root_: DictConfig) -> str:
    """<arm>-<digest>/seed<n>, or traces-<digest> without a model: below the folder of the experiment."""
    plain = stored_config(_root_)
    seed = plain.pop("seed", None)
    name = f"{plain['arm']}-{digest(plain)}"
    return name if seed is None else f"{name}/seed{seed}"


def register_drift() -> None:
    """Make the schema and its resolver known to Hydra; safe to call twice."""
    ConfigStore.instance().store(name="schema_drift", node=DriftConfig)
    OmegaConf.register_new_resolver("drift_run", run_name, replace=True)
