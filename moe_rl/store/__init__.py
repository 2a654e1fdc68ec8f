"""A run directory: what a training run writes and what every later reader sees.

    config.yaml         resolved configuration of the run
    environment.json    versions, commit, threads and start time of the first try
    steps.jsonl         one record a rollout batch       updates.jsonl   one a gradient update
    evals.jsonl         one record an evaluation         events.jsonl    restarts, repairs, old failures
    checkpoints/        step-00000020/{model,optimizer}.safetensors, state.json, SHA256SUMS
    DONE | FAILED       JSON summary of a finished run | what failed in one line, and the traceback
    final/              the trained model             snapshots/      models of earlier steps, where asked for
    content.txt         digest of the weights, tokenizer and problems that the run began with
    nonfinite/          batches of updates that were not finite
    tracking/           what a tracker keeps here, where one is asked for
    run.lock, run.pid   held while a process writes

Every whole file and every checkpoint is written beside its place, fsynced and renamed, and every metric is
one appended line, so that a process killed at any moment leaves a directory that can be read and resumed.
What cannot be written (disk full, no permission) is one StoreError.  Importing this package does not import
torch.
"""

from moe_rl.store.checkpoints import Checkpoint
from moe_rl.store.environment import environment
from moe_rl.store.files import StoreError, write_atomic
from moe_rl.store.reader import Run, find_runs
from moe_rl.store.whole import whole_directory
from moe_rl.store.writer import RunStore, dotted

__all__ = [
    "Checkpoint",
    "Run",
    "RunStore",
    "StoreError",
    "dotted",
    "environment",
    "find_runs",
    "whole_directory",
    "write_atomic",
]
