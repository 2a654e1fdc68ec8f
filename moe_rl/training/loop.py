"""GRPO, GRPO + Routing Replay and GSPO under one loop: the whole algorithm, top to bottom.

The three arms differ in two places only: the objective, and the routing of the new policy's forward
(`routing_of` in update.py). Everything else, prompts and random streams included, they share.

What differs from the paper (arXiv 2507.18071): the prompts of a step are consecutive items of the task's
seeded stream rather than a shuffled epoch; there is no KL to a reference policy and no load-balancing loss
unless the options ask for them.
"""

from __future__ import annotations

from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective
from moe_rl.routing import expert_change
from moe_rl.store import RunStore
from moe_rl.tasks import Task
from moe_rl.training.border import check_turns
from moe_rl.training.checkpoint import resume, save
from moe_rl.training.config import TrainConfig
from moe_rl.training.evaluate import evaluate
from moe_rl.training.grading import GuardedTask
from moe_rl.training.groups import sample_ahead, sample_groups
from moe_rl.training.intervention import intervene
from moe_rl.training.learner import Learner, make_learner
from moe_rl.training.measure import PhaseClock, step_metrics
from moe_rl.training.nonfinite import Evidence, collapse_when_sampling, is_finite
from moe_rl.training.passes import native_routing, old_policy, split
from moe_rl.training.precision import compute_in
from moe_rl.training.progress import steps_bar
from moe_rl.training.signal import learning_signal
from moe_rl.training.update import Update, gradient_update

SHOWN = ("reward/mean", "response/length", "clip_frac/token", "drift/old")  # beside the progress bar


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
    check_turns(task, config)
    learner = make_learner(lm.model, objective, config)
    guarded = GuardedTask(task, config.rollout.grading_timeout)
    with compute_in(config.precision, lm.model.device):
        train_with(learner, lm, guarded, store, title, bar)


def train_with(
    learner: Learner, lm: LanguageModel, task: GuardedTask, store: RunStore, title: str, bar: int
) -> None:
    """`train` with what the objective needs: from the last checkpoint on, step by step."""
    policy, config = learner.policy, learner.config
    done, ahead = resume(learner.trained, learner.optimizer, store, lm.model.device)
    if done == 0:
        store.event("shares_prompts", value=learner.share_prompts)
        evaluate(lm, task, config, store, 0, title)

    progress = steps_bar(title, done, config.steps, bar)
    for step in progress:
        clock = PhaseClock()

        # Sample G responses to each of P prompts from the current policy, which is π_old from here on, and
        # reward each whole response. Under partial rollout the first tokens were drawn a step ago.
        with clock("rollout"), collapse_when_sampling(store, step):
            routed = config.replay.source == "rollout"  # its routing is recorded
            groups = sample_groups(learner, lm, task, step, record=routed, ahead=ahead)
            ahead = sample_ahead(learner, lm, task, step, record=routed)
        batch = groups.batch

        # Old-policy pass: log-probabilities and routing, by the forward that training uses, or the sampler's
        # in its place (§5.4); then the group advantages Â_i = (r_i - mean r) / std r (Eq. 3) and what else
        # the objective asks for.
        plan = split(len(batch), config.optim.minibatches, config.optim.microbatch)
        with clock("old_policy"):
            old = old_policy(learner, groups, plan, step)
            old, intervention = intervene(learner, batch, old, plan, step)
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
            if config.drift_due(step) and update.finite and old_routing is not None and last is not None:
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

        record = {"step": step, "reward/grader_errors": task.report_errors(store, step, title)}
        record |= step_metrics(learner, groups, old, signal, counted, skipped=len(updates) - len(counted))
        record |= intervention | clock.metrics()
        store.log("steps", record)
        progress.set_postfix({key: f"{record[key]:.3g}" for key in SHOWN if key in record})

        # Nothing that is kept may be of a broken policy.
        keeping = config.checkpoint_due(step) or config.snapshot_due(step)
        finite = is_finite(learner, batch if keeping or stopped else None)
        if finite and (stopped or config.evaluation_due(step)):
            evaluate(lm, task, config, store, step, title)
        if stopped:
            raise evidence.collapse_of_update(updates[-1], len(updates))
        if not finite:
            raise evidence.collapse_of_policy(updates)
        save(learner, lm, store, step, ahead)
