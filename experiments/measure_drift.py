"""Measure how many experts change with an update, where and why:

    python -m experiments.measure_drift model=tiny seed=0
    python -m experiments.measure_drift -m experiment=drift_lr
    python -m experiments.measure_drift old=FILE new=FILE

The third compares two recorded traces of the same tokens, without a model: own files and streams, and those
of other engines with `trace_files.model=DIR` (see `experiments.inspect_trace`). A run directory gets the
tables as CSV, the figures as PNG and a page that shows them, index.html; one that is done is left alone.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.config import build_objective, build_task
from experiments.drift_config import DriftConfig, drift_config, register_drift, stored_config
from experiments.launch import (
    CONF,
    attempt,
    command,
    interruptible,
    set_up_process,
    starting_model,
    terminal_line,
    write_tables,
)
from experiments.sweep import lists_failures
from experiments.traces import model_sizes, read_trace
from moe_rl.analysis.drift_report import write_drift_report
from moe_rl.laboratory.offline import compare_traces
from moe_rl.laboratory.protocol import Measurement, measure, phases
from moe_rl.laboratory.rows import COLUMNS
from moe_rl.store import Run, RunStore, environment
from moe_rl.training.border import check_one_batch, check_together, require_gradable
from moe_rl.training.progress import phases_bar

register_drift()


@lists_failures
@hydra.main(version_base="1.3", config_path=CONF, config_name="measure_drift")
def main(cfg: DictConfig) -> None:
    path = attempt(cfg, run)
    if path is None:
        return
    summary = Run(path).summary
    first, last = summary["experts_changed_first"], summary["experts_changed_last"]
    changed = f"{first:.2%} of experts changed"
    if summary["updates"] > 1:
        changed = f"{first:.2%} of experts changed after the first update, {last:.2%} after the last"
    beside = ", ".join(f"{name}/" for name in ("tables", "figures", "traces") if (path / name).is_dir())
    print(f"{os.path.relpath(path)}: done, {changed}; index.html there shows it ({beside})")


def run(cfg: DictConfig, path: Path) -> None:
    """One measurement from config to DONE; what goes wrong after the config check leaves FAILED."""
    config = drift_config(cfg)
    if config.offline:
        compare(config, cfg, path)
    else:
        measure_model(config, cfg, path)


def measure_model(config: DriftConfig, cfg: DictConfig, path: Path) -> None:
    """Load, warm up, sample, update, measure."""
    task, objective = build_task(cfg), build_objective(cfg)
    check_together(objective, config)
    check_one_batch(config)
    require_gradable(task, config.rollout.grading_timeout)
    set_up_process(config)
    bar = terminal_line()
    with open_store(cfg, path) as store:
        lm, warm = starting_model(config, cfg, path, task, objective, bar)
        with phases_bar(f"{config.arm} seed {config.seed}", phases(config, config.drift), bar) as done:
            found = measure(lm, task, objective, config, config.drift, done)
        finish(store, path, found, warm)


def compare(config: DriftConfig, cfg: DictConfig, path: Path) -> None:
    """Two recorded traces of the same tokens."""
    files = config.trace_files
    sizes = model_sizes(files.model, files.layers, files.experts, files.top_k, files.moe_layers)
    assert config.old is not None and config.new is not None
    old, new = (read_trace(file, sizes, files.format) for file in (config.old, config.new))
    with open_store(cfg, path) as store:
        found = compare_traces(old, new, config.drift.resamples, files.prompt_tokens)
        finish(store, path, found, {})


def open_store(cfg: DictConfig, path: Path) -> RunStore:
    found = environment() | {"command": command("experiments.measure_drift")}
    return RunStore.open(path, stored_config(cfg), found)


def finish(store: RunStore, path: Path, found: Measurement, more: dict[str, object]) -> None:
    """Tables, traces, figures and the page, then DONE."""
    write_tables(path, found.tables, COLUMNS)
    if found.traces:
        (path / "traces").mkdir(exist_ok=True)
    for name, trace in found.traces.items():
        trace.save(path / "traces" / f"{name}.safetensors")
    write_drift_report([Run(path)], path, shlex.join(command("experiments.measure_drift")))
    store.finish(found.summary | more)


if __name__ == "__main__":
    with interruptible():
        main()
