"""Noise in ratios and gradients of one pair of policies: the sampler's error, length, mini-batches.

π_old samples a rollout batch, in float32 and in the sampler's own precision, and a few responses of thousands
of tokens; π_θ is π_old after the first updates on that batch, by the configured objective. Then, in clip
units of GRPO and GSPO: how far the samplers are from the trainer's π_old, and π_θ is; how the variance of
both log-ratios goes with length; and how alike the gradients of the remaining mini-batches are, of GRPO, GRPO
with Routing Replay and GSPO, with and without clipping, all at the same π_θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_rl.laboratory.clip_units import clip_unit_sums
from moe_rl.laboratory.gradient_noise import gradient_noise, inner_products, minibatch_gradient
from moe_rl.laboratory.length_variance import length_sums
from moe_rl.laboratory.long_responses import CHUNK, chunked_logp, posed_rounds, sample_long
from moe_rl.laboratory.rows import COLUMNS, Row, rows_of
from moe_rl.laboratory.sums import RESAMPLES, ResponseSums
from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective, get_objective
from moe_rl.tasks import Task
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import TrainConfig
from moe_rl.training.forward import Forced, Native
from moe_rl.training.grading import GuardedTask
from moe_rl.training.groups import Groups, sample_groups
from moe_rl.training.learner import Learner, make_learner
from moe_rl.training.nonfinite import CollapseError
from moe_rl.training.passes import OldPolicy, Plan, flat, old_policy_pass, split
from moe_rl.training.policy import score
from moe_rl.training.sampler import copy_in
from moe_rl.training.seeds import random_stream
from moe_rl.training.signal import Signal, learning_signal
from moe_rl.training.update import gradient_update

# What never clips a ratio, which is above 0.
UNCLIPPED: dict[str, Any] = {"clip_low": 1.0, "clip_high": math.inf}
# The gradients that are compared: the objective, and whether π_old's experts are replayed.
ARMS = {
    "grpo": (get_objective("grpo"), False),
    "grpo+replay": (get_objective("grpo"), True),
    "gspo": (get_objective("gspo"), False),
    "grpo unclipped": (get_objective("grpo", **UNCLIPPED), False),
    "gspo unclipped": (get_objective("gspo", **UNCLIPPED), False),
}
NUMBERS = ("cosine_pairs", "cosine_full", "cosine_rest", "signal", "noise", "norm")


@dataclass
class NoiseOptions:
    """What is measured, and how much of it."""

    updates: int = 1  # mini-batches trained on to get from π_old to π_θ; the others give the gradients
    lengths: list[int] = field(default_factory=lambda: [16, 64, 256, 1024, 4096, 10240])  # tokens
    responses: int = 32  # of the longest of these lengths, each of problem after problem
    rounds: int = 4  # problems in one context of a cold-start example, so that long responses are not new
    sampler_dtype: str = "bfloat16"  # of the sampler that is compared with the trainer
    chunk: int = CHUNK  # tokens a forward of a long response
    resamples: int = RESAMPLES  # of the 95 % bootstrap intervals over responses

    def check(self, config: TrainConfig) -> None:
        """Raise `ValueError` for options that cannot be, alone or with those of training."""
        for name, value, least in (
            ("updates", self.updates, 0), ("responses", self.responses, 2), ("chunk", self.chunk, 1),
            ("rounds", self.rounds, 1), ("resamples", self.resamples, 1),
            ("lengths", min(self.lengths, default=0), 1),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"noise.{name}={getattr(self, name)}: must be at least {least}")
        if self.sampler_dtype not in ("bfloat16", "float16"):
            raise ValueError(f"noise.sampler_dtype={self.sampler_dtype!r}: expected bfloat16 or float16")
        if config.optim.minibatches < self.updates + 2:
            raise ValueError(
                f"optim.minibatches={config.optim.minibatches}: noise.updates={self.updates} of them are "
                "trained on, and at least 2 must be left to compare their gradients"
            )
        if config.precision is not None or config.optim.epochs != 1 or config.optim.aux_loss_coef:
            raise ValueError(
                "precision, optim.epochs and optim.aux_loss_coef are options of training: noise is measured "
                "in the weights' precision, on one pass over a batch, of the objective alone"
            )
        # what training may do beside its plain loop, none of which belongs in this measurement
        for section in ("rollout", "replay", "intervention", "mismatch"):
            given, plain = getattr(config, section), type(getattr(config, section))()
            for option in fields(given):
                usual = getattr(plain, option.name)
                if option.name not in PLAIN_ROLLOUT and getattr(given, option.name) != usual:
                    raise ValueError(
                        f"{section}.{option.name}: an option of training; noise is measured with {usual!r}"
                    )


PLAIN_ROLLOUT = ("prompts", "responses", "max_new_tokens", "temperature", "microbatch", "grading_timeout")


@dataclass(frozen=True, eq=False)
class NoiseMeasurement:
    """Rows by table, see `rows.COLUMNS`, and what is worth a line.

    clip_units   `clip_unit_sums`; subject: a sampler by its precision (log π_old/μ), or "update"
                 (log π_θ/π_old)
    length       `length_sums` by length; subject: "sampler" or "update"
    gradients    `GradientNoise` of each of ARMS
    """

    tables: dict[str, list[Row]]
    summary: dict[str, object]


def noise_phases(options: NoiseOptions) -> int:
    """How often `measure_noise` calls `done`."""
    return 6 + len(ARMS)


def measure_noise(
    lm: LanguageModel,
    task: Task,
    objective: Objective,
    config: TrainConfig,
    options: NoiseOptions,
    done: Callable[[str], None] = lambda phase: None,
) -> NoiseMeasurement:
    """Train `lm.model` in place by `options.updates` updates and measure; `done` is called after every phase.

    Raises `ValueError` for options that do not go together, prompts and lengths that do not fit the model,
    and where too few mini-batches have a reward difference; `CollapseError` for an update that is not finite.
    """
    options.check(config)
    learner = make_learner(lm.model, objective, config)
    if learner.needs:
        raise ValueError(
            f"objective {type(objective).__name__} needs {sorted(learner.needs)}, which GRPO and GSPO at the "
            "same policies do not take: choose one that needs nothing"
        )
    task = GuardedTask(task, config.rollout.grading_timeout)
    posed, answer = posed_rounds(lm, task, options.responses, max(options.lengths), config.seed)
    plan = split(
        config.rollout.prompts * config.rollout.responses, config.optim.minibatches, config.optim.microbatch
    )
    clip_units: list[Row] = []
    for dtype in (options.sampler_dtype, None):  # the last is the batch that is trained on
        groups = sample_groups(sampling_in(learner, dtype), lm, task, 1)
        old = old_policy_pass(learner, groups, plan)
        error_BT = old.logp_BT.cpu().double() - groups.batch.sampler_logp_BT.cpu().double()
        clip_units += unit_rows(f"{dtype or 'float32'} sampler", error_BT, groups, slice(None), options)
        done(f"rollout of the {dtype or 'float32'} sampler")
    signal = learning_signal(learner, groups, old, plan)

    temperature = config.rollout.temperature
    narrow = copy_in(lm, getattr(torch, options.sampler_dtype)).model
    with random_stream(config.seed, "long responses"):
        long = sample_long(narrow, posed, answer, temperature)
    drawn_T = long.response_mask_BT[0] > 0  # the same columns in every row
    done(f"{len(long)} responses of {max(options.lengths)} tokens")
    old_BT = chunked_logp(lm.model, long, temperature, options.chunk).double()
    done("long responses under the old policy")

    for number in range(options.updates):
        update = gradient_update(learner, groups.batch, old, signal, plan[number], number)
        if not update.finite:
            raise CollapseError(f"collapsed: loss or gradient norm of update {number + 1} is not finite")
        if update.grad_norm == 0:
            raise ValueError(
                f"the rewards of every group of mini-batch {number + 1} are equal, so that its update is "
                "zero: take more prompts or responses, an easier task or a longer cold start"
            )
    rest = plan[options.updates :]
    rows = slice(rest[0][0].start, rest[-1][-1].stop)
    change_BT = policy_logp(learner, groups.batch, rest).cpu().double() - old.logp_BT[rows].cpu().double()
    clip_units += unit_rows("update", change_BT, groups, rows, options)
    done("updates")

    gradients = list(gradient_rows(learner, groups, old, signal, rest, done))
    new_BT = chunked_logp(lm.model, long, temperature, options.chunk).double()
    done("long responses under the new policy")
    length: list[Row] = []
    sampled_BT = long.sampler_logp_BT.cpu().double()
    for subject, ratio_BT in (("sampler", old_BT - sampled_BT), ("update", new_BT - old_BT)):
        sums = length_sums(ratio_BT[:, drawn_T.cpu()], options.lengths)
        length += of_sums(sums, subject, options.resamples, by="length", at=options.lengths)
    tables = {"clip_units": clip_units, "length": length, "gradients": gradients}
    return NoiseMeasurement(tables, _summary(groups, tables, options))


def sampling_in(learner: Learner, dtype: str | None) -> Learner:
    """The learner with another precision of its sampler."""
    rollout = replace(learner.config.rollout, sampler_dtype=dtype)
    return replace(learner, config=replace(learner.config, rollout=rollout))


@torch.no_grad()
def policy_logp(learner: Learner, batch: RolloutBatch, plan: Plan) -> Tensor:
    """log π_θ [B, T] of the rows of a plan, natively routed, by the forward of the updates."""
    temperature, share = learner.config.rollout.temperature, learner.share_prompts
    parts = [score(learner.policy, batch[rows], temperature, share_prompts=share) for rows in flat(plan)]
    return torch.cat([part.logp_BT for part in parts])


def gradient_rows(
    learner: Learner,
    groups: Groups,
    old: OldPolicy,
    signal: Signal,
    plan: Plan,
    done: Callable[[str], None],
) -> Iterator[Row]:
    """Rows of the gradient noise of every arm, all of the mini-batches in which none of them is 0; without
    those of replay for a dense model. Raises `ValueError` where fewer than two mini-batches are left."""
    dots: dict[str, Tensor] = {}
    for arm, (objective, replayed) in ARMS.items():
        if not replayed or old.trace is not None:
            routing = Forced(old.trace) if replayed and old.trace is not None else Native()
            dots[arm] = inner_products(
                torch.stack(
                    [
                        minibatch_gradient(
                            learner, objective, groups.batch, old.logp_BT, routing, signal, one
                        )
                        for one in plan
                    ]
                )
            )
        done(f"gradients of {arm}")
    kept_N = torch.stack([dot_NN.diagonal() > 0 for dot_NN in dots.values()]).all(0)
    for arm, dot_NN in dots.items():
        found = gradient_noise(dot_NN[kept_N][:, kept_N])
        for metric in NUMBERS:
            yield _number(arm, metric, getattr(found, metric), found.n, "mini-batches")


def unit_rows(
    subject: str, log_ratio_BT: Tensor, groups: Groups, rows: slice, options: NoiseOptions
) -> list[Row]:
    """`clip_unit_sums` of some responses, with intervals over their prompts."""
    prompts, responses = groups.rewards_PG.shape
    groups_B = torch.arange(prompts).repeat_interleave(responses)
    sums = clip_unit_sums(log_ratio_BT, groups.batch.response_mask_BT[rows], groups_B[rows])
    return of_sums(sums, subject, options.resamples)


def of_sums(
    sums: dict[str, ResponseSums], subject: str, resamples: int, by: str = "all", at: list[int] | None = None
) -> list[Row]:
    """Rows of every metric, over response tokens."""
    places = [""] if at is None else at
    return [
        row
        for metric, found in sums.items()
        for row in rows_of(
            found, resamples, subject=subject, rows="response", metric=metric, by=by, at=places
        )
    ]


def _number(subject: str, metric: str, value: float, n: int, unit: str) -> Row:
    """A row of a number that nothing is resampled for."""
    cells = (subject, "response", metric, "all", "", value, 1, value, math.nan, math.nan, n, unit)
    return dict(zip(COLUMNS, cells, strict=True))


def _summary(groups: Groups, tables: dict[str, list[Row]], options: NoiseOptions) -> dict[str, object]:
    found = {
        (row["subject"], row["metric"], row["at"]): row["value"] for rows in tables.values() for row in rows
    }
    longest = max(options.lengths)
    return {
        "responses": groups.rewards_PG.numel(),
        "reward": groups.rewards_PG.mean().item(),
        "long_responses": options.responses,
        "longest": longest,
        "inflation_longest": found["update", "inflation", longest],
        "cosine_pairs": {arm: found.get((arm, "cosine_pairs", "")) for arm in ARMS},
    }
