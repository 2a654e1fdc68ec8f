import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_rl.store import Run, RunStore

CONFIG: dict[str, Any] = {
    "experiment": "demo",
    "model": {"name": "tiny_moe"},
    "task": {"name": "sort"},
    "objective": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.27},
    "replay": {"source": None},
    "optim": {"lr": 3e-4, "minibatches": 2},
    "steps": 20,
    "collapse": {"window": 2, "fraction": 0.5, "patience": 2},
}
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run with the store; rewards are one a step, evals are (step, greedy, sampled)."""

    def make(
        name: str,
        arm: str = "grpo",
        seed: int = 0,
        rewards: tuple[float, ...] = (0.5,) * 20,
        evals: tuple[tuple[int, float, float], ...] = ((0, 0.25, 0.2), (20, 0.75, 0.7)),
        clip: float = 0.002,
        moe: bool = True,
        finish: bool = True,
        summary: dict[str, Any] | None = None,
        **config: Any,
    ) -> Run:
        path = tmp_path / "runs" / name
        settings = copy.deepcopy(CONFIG) | {"arm": arm, "seed": seed} | config
        with RunStore.open(
            path, settings, {"git_commit": "c0ffee" * 6 + "abcd", "git_dirty": False}
        ) as store:
            for step, greedy, sampled in evals:
                store.log(
                    "evals", {"step": step, "eval/greedy": greedy, "eval/sampled": sampled, "eval/n": 128}
                )
            for step, reward in enumerate(rewards, start=1):
                store.log("steps", step_record(step, reward, clip, moe))
                for update in (1, 2):
                    drift = {"drift/old": 0.01 * update, "drift/step": 0.01} if moe else {}
                    store.log("updates", {"step": step, "update": update, "loss": 0.1, **drift})
            if finish:
                store.finish({"layer_ids": [1, 3]} if summary is None else summary)
        return Run(path)

    return make


def step_record(step: int, reward: float, clip: float, moe: bool) -> dict[str, Any]:
    drift = {"drift/first": 0.01, "drift/old": 0.02, "drift/old_by_layer": [0.01, 0.01 + 0.002 * step]}
    return {
        "step": step,
        "reward/mean": reward,
        "loss": 0.1,
        "grad_norm": 1.0,
        "response/length": 20.0,
        "response/truncated": 0.0,
        "reward/zero_std_groups": 0.25,
        "entropy": 0.5,
        "kl/k3": 0.001,
        "ratio/token_log_sq": 0.04,
        "ratio/sequence_std": 0.003,
        "clip_frac/token": clip if step % 2 else 0.0,
        "time/total": 1.5,
        **(drift if moe else {}),
    }
