"""RoutingReplayGRPOTrainer on a run directory: the loop's prompts, streams and schedule, and its records."""

from __future__ import annotations

import contextlib
import io
import math
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback

from experiments.config import Config
from experiments.trl_checkpoint import process, save_checkpoint
from moe_rl.integrations.carried import OLD, counted_rows, sequences, take_trace
from moe_rl.integrations.pool import LossPass, MetricPool, combined
from moe_rl.integrations.trl import RoutingReplayGRPOTrainer
from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective, equal_rewards
from moe_rl.routing import (
    ExpertChange,
    RoutingTrace,
    expert_change,
    expert_load,
    max_violation,
    record_routing,
)
from moe_rl.store import RunStore
from moe_rl.tasks import Problem
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.evaluate import evaluate
from moe_rl.training.grading import GuardedTask
from moe_rl.training.loop import SHOWN
from moe_rl.training.nonfinite import collapse
from moe_rl.training.precision import compute_in
from moe_rl.training.progress import steps_bar
from moe_rl.training.seeds import random_stream
from moe_rl.training.update import drift_metrics


@dataclass
class Scene:
    """One run, as one of its processes sees it; `done` steps were made before."""

    lm: LanguageModel
    task: GuardedTask
    objective: Objective
    config: Config
    store: RunStore
    title: str
    bar: int
    done: int = 0

    @property
    def updates_per_step(self) -> int:
        return self.config.optim.minibatches * self.config.optim.epochs

    @property
    def trained(self) -> nn.ModuleDict:
        """The policy under the name that it has in checkpoints."""
        return nn.ModuleDict({"policy": self.lm.model})

    def evaluate(self, step: int) -> None:
        """Held-out accuracy: all processes compute it, since weights may be sharded; the first writes it."""
        model = self.lm.model
        model.eval()
        quiet = contextlib.nullcontext() if process()[0] == 0 else contextlib.redirect_stdout(io.StringIO())
        with quiet, compute_in(self.config.precision, model.device):
            evaluate(self.lm, self.task, self.config, self.store, step, self.title)
        model.train()


@dataclass
class Logged:
    """One update: what TRL logged of it, and the expert changes after it."""

    logs: dict[str, float]
    since_old: ExpertChange | None = None
    since_last: ExpertChange | None = None

    def metrics(self) -> dict[str, Any]:
        """In the loop's names. TRL's own drift/old is of the forward before the update."""
        of_objective = ("clip_frac/", "ratio/", "kl/", "entropy/")
        kept = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
        kept["replay/overridden"] = "replay/overridden"
        found: dict[str, Any] = {name: self.logs[of] for of, name in kept.items() if of in self.logs}
        found |= {name: value for name, value in self.logs.items() if name.startswith(of_objective)}
        if self.since_old is not None and self.since_last is not None:
            found |= drift_metrics("drift/old", self.since_old) | drift_metrics("drift/step", self.since_last)
        return found


class StoredTrainer(RoutingReplayGRPOTrainer):
    """Leaves in the run directory what the loop leaves there."""

    def __init__(self, scene: Scene, **options: Any) -> None:
        self.scene = scene
        self.of_step = MetricPool(scene.objective)
        self.updates: list[Logged] = []
        self.started = time.perf_counter()
        self.old_routing: list[RoutingTrace] = []
        self.last_routing: list[RoutingTrace] = []
        super().__init__(objective=scene.objective, **options)
        self.remove_callback(PrinterCallback)
        self.progress = steps_bar(scene.title, scene.done, scene.config.steps, scene.bar)

    # What the loop does otherwise than TRL.

    def _send_telemetry(self) -> None:
        """Nothing, to nobody."""

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [prompt_ids(self.scene.lm.tokenizer, Problem(prompt, "")) for prompt in prompts], None, {}

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # A stream for each rollout, so that a resumed run draws and shuffles as an uninterrupted one.
        rollout, place = divmod(self._step, self.args.steps_per_generation * self.num_iterations)
        stream = ("trl", self.scene.done + rollout, self.accelerator.process_index)
        with random_stream(self.scene.config.seed, *stream):
            inputs = super()._prepare_inputs(generation_batch)
        if place == 0 and self._records:
            self.old_routing = self._old_routing()
        return inputs

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        rewards_BF: Tensor = super()._calculate_rewards(*arguments, **options)
        self.graded_PG = rewards_BF[:, 0].view(-1, self.num_generations).cpu()
        return rewards_BF

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = max(1, self.scene.config.optim.warmup_updates)
        before = self.scene.done * self.scene.updates_per_step
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer,
            lambda update: min(1.0, (before + update + 1) / warmup),
        )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]  # TRL's leave out norms and biases

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(float(norm)):
            step, number = self._place(self.state.global_step + 1)
            text = (
                f"update {number}: gradient norm {float(norm):g}; the update was not applied; lower optim.lr"
            )
            raise collapse(self.scene.store, step, "non-finite gradient norm", text)
        return norm

    # What the run directory gets.

    def _place(self, global_step: int) -> tuple[int, int]:
        """(step, update within it) of TRL's optimiser step, all counted from 1."""
        steps, updates = divmod(global_step - 1, self.scene.updates_per_step)
        return self.scene.done + steps + 1, updates + 1

    def observe(self, seen: LossPass) -> None:
        super().observe(seen)
        self.of_step.add(seen)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            self._after_update(logs)

    def _after_update(self, logs: dict[str, float]) -> None:
        scene = self.scene
        step, number = self._place(self.state.global_step)
        update = Logged(logs)
        self.updates.append(update)
        if self._records and scene.config.drift_due(step):
            self._measure_drift(update, first=number == 1)
        scene.store.log("updates", {"step": step, "update": number} | update.metrics())
        if number < scene.updates_per_step:
            return
        record = self._step_record(step)
        scene.store.log("steps", record)
        self.progress.set_postfix(
            {key: f"{record[key]:.3g}" for key in SHOWN if key in record}, refresh=False
        )
        self.progress.update()
        if scene.config.evaluation_due(step):
            scene.evaluate(step)
        if scene.config.checkpoint_due(step):
            first = self.accelerator.is_main_process
            save_checkpoint(scene.store, step, scene.trained, self.optimizer.optimizer, first)
        self.updates.clear()
        self.started = time.perf_counter()

    def _old_routing(self) -> list[RoutingTrace]:
        """π_old's own routing on the rows that score response tokens, by micro-batch, before the updates.

        Under rollout replay it takes a pass of its own, as in the loop: what travels with the batch are the
        choices on the hidden states that the sampler's experts lead to.
        """
        if self.replay == "rollout":
            return self._native_routing()
        return [
            take_trace(part, OLD, self._layout).where(counted_rows(part).cpu())
            for part in self._buffered_inputs
        ]

    @torch.no_grad()
    def _native_routing(self) -> list[RoutingTrace]:
        """The same of the policy as it is now, by a forward."""
        found = []
        for part in self._buffered_inputs:
            ids_BT, mask_BT = sequences(part)
            with record_routing(self.model) as recorder:
                self._get_per_token_logps_and_entropies(
                    self.model, ids_BT, mask_BT, part["completion_ids"].shape[1]
                )
            found.append(recorder.trace().to("cpu").where(counted_rows(part).cpu()))
        return found

    def _measure_drift(self, update: Logged, first: bool) -> None:
        """The policy's native routing on the whole rollout batch, against π_old's and the update before's."""
        old, new = self.old_routing, self._native_routing()
        last = old if first else self.last_routing
        update.since_old, update.since_last = (self._change(before, new) for before in (old, last))
        self.last_routing = new

    def _change(self, before: list[RoutingTrace], after: list[RoutingTrace]) -> ExpertChange:
        changes = [expert_change(a, b) for a, b in zip(before, after, strict=True)]
        return combined(ExpertChange.combine(changes), self.accelerator)

    def _step_record(self, step: int) -> dict[str, Any]:
        scene, updates = self.scene, self.updates
        metrics, changes = self.of_step.reduce(self.accelerator)
        errors = torch.tensor(scene.task.report_errors(scene.store, step, scene.title))
        record: dict[str, Any] = {
            "step": step,
            "reward/grader_errors": int(self._summed(errors)),
            "reward/mean": self.graded_PG.double().mean().item(),
            "reward/std": self.graded_PG.std(correction=0).item(),
            "reward/zero_std_groups": equal_rewards(self.graded_PG).float().mean().item(),
            "response/length": updates[0].logs["completions/mean_length"],
            "response/truncated": updates[0].logs["completions/clipped_ratio"],
            "entropy": metrics["entropy/token_mean"],
            **metrics,
            "loss": fmean(update.logs["loss"] for update in updates),
            "grad_norm": fmean(update.logs["grad_norm"] for update in updates),
            "grad_norm_max": max(update.logs["grad_norm"] for update in updates),
            "updates/skipped": 0,
            "lr": updates[-1].logs["learning_rate"],
        }
        if "replay/overridden" in changes:
            record["replay/overridden"] = changes["replay/overridden"].experts
        since_last = [u.since_last for u in updates if u.since_last is not None]
        if since_last and updates[0].since_old is not None and updates[-1].since_old is not None:
            record["drift/first"] = updates[0].since_old.experts
            record |= drift_metrics("drift/old", updates[-1].since_old)
            record |= drift_metrics("drift/step", ExpertChange.combine(since_last))
        if self._records:
            load_LE = sum(expert_load(trace) for trace in self.old_routing)
            record["load/max_violation"] = max_violation(self._summed(load_LE))
        return record | {"time/total": time.perf_counter() - self.started}

    def _summed(self, counts: Tensor | Any) -> Tensor:
        summed: Tensor = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        return summed.cpu()
