"""GRPO, GRPO + Routing Replay and GSPO under one loop: the whole algorithm, top to bottom.

The three arms differ in two places only: the objective, and the routing of the new policy's forward
(`routing_of` in update.py). Everything else, prompts and random streams included, they share.

What differs from the paper (arXiv 2507.18071): the prompts of a step are consecutive items of the task's
seeded stream rather than a shuffled epoch; there is no KL to a reference policy unless the objective's
options ask for it; the load-balancing loss is off.
"""

from __future__ import annotations

from tqdm.auto import tqdm

from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective
from moe_rl.objectives.mismatch import mismatch_metrics
from moe_rl.routing import expert_change
from moe_rl.store import RunStore, whole_directory
from moe_rl.tasks import Task
from moe_rl.training.checkpoint import model_tensors, optimizer_tensors, resume
from moe_rl.training.config import TrainConfig
from moe_rl.training.evaluate import accuracy, held_out
from moe_rl.training.grading import GuardedTask
from moe_rl.training.groups import sample_groups
from moe_rl.training.intervention import intervene
from moe_rl.training.learner import Learner, make_learner
from moe_rl.training.measure import (
    PhaseClock,
    masked_mean,
    response_metrics,
    reward_metrics,
    routing_metrics,
    update_metrics,
)
from moe_rl.training.nonfinite import Evidence, collapse_when_sampling, is_finite
from moe_rl.training.passes import native_routing, old_policy_pass, split
from moe_rl.training.precision import compute_in
from moe_rl.training.signal import learning_signal
from moe_rl.training.update import Update, gradient_update, metrics_over


def train(
    lm: LanguageModel,
    task: Task,
    objective: Objective,
    config: TrainConfig,
    store: RunStore,
    *,
    title: str = "train",
    bar: int = 0,
) -> None:
    """Train `lm.model` in place for `config.steps` steps, logging to `store`; resumes from its checkpoint.

    `title` names the progress bar and `bar` is its line, for runs that share a terminal.

    An update whose loss or gradient norm is not finite is not applied. Raises `CollapseError` at the first
    one under `optim.nonfinite="stop"`, with the step's record written, and for a policy that is not finite;
    `ValueError` where objective, replay and model do not go together.
    """
    learner = make_learner(lm.model, objective, config)
    with compute_in(config.precision, lm.model.device):
        train_with(learner, lm, task, store, title, bar)


def train_with(
    learner: Learner, lm: LanguageModel, task: Task, store: RunStore, title: str, bar: int
) -> None:
    """`train` with what the objective needs: from the last checkpoint on, step by step."""
    policy, config = learner.policy, learner.config
    task = GuardedTask(task, config.rollout.grading_timeout)
    done = resume(learner.trained, learner.optimizer, store)
    if done == 0:
        evaluate(lm, task, config, store, 0, title)

    progress = tqdm(
        range(done + 1, config.steps + 1),
        title,
        initial=done,
        total=config.steps,
        unit="step",
        position=bar,
        dynamic_ncols=True,
        disable=None,  # off when not a terminal
    )
    for step in progress:
        clock = PhaseClock()

        # Sample G responses to each of P prompts from the current policy, which is π_old from here on, and
        # reward each whole response.
        with clock("rollout"), collapse_when_sampling(store, step):
            groups = sample_groups(
                lm,
                task,
                config.rollout.at(step),
                config.seed,
                step,
                record=config.replay.source == "rollout",
                share_prompts=learner.share_prompts,
            )
        batch = groups.batch

        # Old-policy pass: log-probabilities and routing, by the forward that training uses; then the group
        # advantages Â_i = (r_i - mean r) / std r (Eq. 3) and what else the objective asks for.
        plan = split(len(batch), config.optim.minibatches, config.optim.microbatch)
        with clock("old_policy"):
            old = old_policy_pass(learner, groups, plan)
            done_to_it: dict[str, float] = {}
            if config.intervention.active:
                old, done_to_it = intervene(learner, batch, old, plan, step)
            signal = learning_signal(learner, groups, old, plan)

        # N gradient updates an epoch, one per mini-batch of whole groups; after each, the new policy's native
        # routing on the whole batch against π_old's and against the policy just before the update (§5.3).
        updates: list[Update] = []
        evidence = Evidence(store, step, groups, old, signal)
        on_response = batch.routing_rows_BT
        old_routing = last = None if old.trace is None else old.trace.where(on_response)
        for minibatch in plan * config.optim.epochs:
            before = (step - 1) * len(plan) * config.optim.epochs + len(updates)
            with clock("update"):
                update = gradient_update(learner, batch, old, signal, minibatch, before)
            updates.append(update)
            if config.measure_drift and update.finite and old_routing is not None and last is not None:
                with clock("drift"):
                    new = native_routing(policy, batch, plan, learner.share_prompts).where(on_response)
                    update.since_old = expert_change(old_routing, new)
                    update.since_last = expert_change(last, new)
                    last = new
            store.log("updates", {"step": step, "update": len(updates)} | update.metrics())
            if not update.finite:
                evidence.record(update, len(updates), config.optim.nonfinite)
                if config.optim.nonfinite == "stop":
                    break
        stopped = not updates[-1].finite and config.optim.nonfinite == "stop"
        counted = updates if stopped else [update for update in updates if update.finite]

        # The objective's metrics over all updates of the step in one call, so that they reduce exactly.
        record = {
            "step": step,
            **reward_metrics(groups),
            "reward/grader_errors": task.report_errors(store, step, title),
            **response_metrics(batch),
            "entropy": masked_mean(old.entropy_BT, batch.response_mask_BT),
            **metrics_over(learner, old, signal, counted),
            **mismatch_metrics(old.logp_BT, batch.sampler_logp_BT, batch.response_mask_BT),
            **signal.metrics,
            **done_to_it,
            **update_metrics(counted, skipped=len(updates) - len(counted)),
            **routing_metrics(old.trace, groups.trace, on_response),
            **clock.metrics(),
        }
        store.log("steps", record)
        shown = ("reward/mean", "response/length", "clip_frac/token", "drift/old")
        progress.set_postfix({key: f"{record[key]:.3g}" for key in shown if key in record})
        end = step == config.steps
        saving = end or step % config.checkpoint_every == 0
        finite = is_finite(learner, batch if saving or stopped else None)
        if stopped and finite:
            evaluate(lm, task, config, store, step, title)  # of the last good policy
        if stopped:
            raise evidence.collapse_of_update(updates[-1], len(updates))
        if not finite:
            raise evidence.collapse_of_policy(updates)

        if end or step % config.evaluation.every == 0:
            evaluate(lm, task, config, store, step, title)
        if saving:
            moments = optimizer_tensors(learner.trained, learner.optimizer)
            store.save_checkpoint(step, model_tensors(learner.trained), moments, {"step": step})
        if config.snapshot_every is not None and step % config.snapshot_every == 0:
            with whole_directory(store.path / "snapshots" / f"step_{step}") as folder:
                lm.save(folder)


def evaluate(
    lm: LanguageModel, task: GuardedTask, config: TrainConfig, store: RunStore, step: int, title: str
) -> None:
    """Log and print greedy and sampled accuracy on the held-out prompts."""
    problems = held_out(task, config.evaluation.prompts)
    limit, stream = config.rollout.at(step).max_new_tokens, (config.seed, step)
    with collapse_when_sampling(store, step):
        greedy = accuracy(lm, task, problems, temperature=0, max_new_tokens=limit, stream=stream)
        sampled = accuracy(
            lm, task, problems, temperature=config.rollout.temperature, max_new_tokens=limit, stream=stream
        )
    record = {"step": step, "eval/greedy": greedy, "eval/sampled": sampled, "eval/n": len(problems)}
    record["eval/grader_errors"] = task.report_errors(store, step, title)
    store.log("evals", record)
    shown = f"{greedy:.3f} greedy, {sampled:.3f} sampled"
    tqdm.write(f"{title}, step {step} of {config.steps}: held-out accuracy {shown}")
