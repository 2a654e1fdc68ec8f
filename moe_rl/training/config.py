"""The options of a training run: what each means, its unit, and what is refused.

Plain dataclasses: Hydra turns them into typed configs in `experiments/`, and any other caller can build
them by hand. `check` is the border: contradictory options are one clear `ValueError` before any work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moe_rl.objectives import NORMALISATIONS
from moe_rl.objectives.mismatch import MismatchCorrection, get_mismatch_correction
from moe_rl.training.precision import PRECISIONS
from moe_rl.training.replay_config import InterventionConfig, ReplayConfig
from moe_rl.training.rollout_config import RolloutConfig


@dataclass
class OptimConfig:
    """AdamW, and into how many gradient updates a rollout batch is split."""

    lr: float = 3e-4
    minibatches: int = 4  # N, gradient updates per rollout batch, split by prompt (GSPO §5.1: 4)
    epochs: int = 1  # times that a rollout batch is trained on: epochs x N updates, in one order
    freeze_routers: bool = False  # RL leaves the routers as the cold start made them
    # Of the load-balancing loss (`moe_rl.training.balance`) beside the objective; 0: off, as in the paper
    aux_loss_coef: float = 0.0
    warmup_updates: int = 10  # learning rate rises linearly over this many gradient updates
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    microbatch: int | None = None  # responses per forward; None: a mini-batch in one forward
    # An update whose loss or gradient norm is NaN or infinite is never applied. "stop" ends the run there, as
    # collapsed; "skip" goes on without it.
    nonfinite: str = "stop"

    def check(self) -> None:
        if self.nonfinite not in ("stop", "skip"):
            raise ValueError(f"optim.nonfinite={self.nonfinite!r}: expected stop or skip")


@dataclass
class MismatchConfig:
    """Correction of the loss for a sampler μ that is not π_old; see `moe_rl.objectives.mismatch`."""

    correction: str | None = None  # token_tis, sequence_tis, icepop, sequence_mis, …_rejection
    low: float | None = None  # bounds of the ratio π_old/μ; None: the correction's own
    high: float | None = None
    # Off-policy sequence mask: drops a response with A < 0 whose mean log μ - log π_θ (nats) is above it.
    off_policy_threshold: float | None = None

    def check(self) -> None:
        if self.correction is None:
            if (self.low, self.high) != (None, None):
                raise ValueError("mismatch.low and mismatch.high need a mismatch.correction")
            return
        self.build()

    def build(self) -> MismatchCorrection | None:
        """The correction that the options name. Raises `ValueError` for an unknown name or bad bounds."""
        if self.correction is None:
            return None
        bounds = {key: value for key in ("low", "high") if (value := getattr(self, key)) is not None}
        return get_mismatch_correction(self.correction, **bounds)


@dataclass
class ColdStartConfig:
    """Supervised warm-up on worked examples; the paper's RL starts from a cold-start model (§5.1)."""

    enabled: bool = True
    target_accuracy: float = 0.35  # sampled accuracy on held-out prompts at which it stops, a fraction
    steps: int = 800  # gives up here if the target is not reached
    batch_size: int = 128  # examples per update
    microbatch: int | None = None  # examples per forward; None: all at once
    lr: float = 2e-3
    warmup_steps: int = 20  # then cosine decay to a tenth over `steps`
    weight_decay: float = 0.01
    aux_loss_coef: float = 0.0  # of the load-balancing loss, see `moe_rl.training.balance`; 0: off
    eval_every: int = 25  # steps
    eval_prompts: int = 128
    # of the examples; its own, so that all seeds of RL start from the same model; null: the run's seed, and
    # with model.seed=null every seed of RL has a starting model of its own
    seed: int | None = 0

    def check(self) -> None:
        if not 0 <= self.target_accuracy <= 1:
            raise ValueError(
                f"cold_start.target_accuracy={self.target_accuracy}: expected a fraction, 0 to 1"
            )
        if not self.aux_loss_coef >= 0:
            raise ValueError(f"cold_start.aux_loss_coef={self.aux_loss_coef}: must be at least 0")


@dataclass
class EvaluationConfig:
    """Held-out accuracy: greedy, and one sample a prompt at the rollout temperature."""

    every: int = 10  # steps; also before the first and after the last
    prompts: int = 128


@dataclass
class CollapseConfig:
    """When a run counts as collapsed; the rule is in `moe_rl.analysis.collapse`."""

    window: int = 5  # steps in the trailing mean of the reward
    fraction: float = 0.5  # of its best so far
    patience: int = 5  # steps in a row below it


@dataclass
class TrainConfig:
    """Everything the loop reads, model, task and objective apart."""

    steps: int = 60
    seed: int = 0  # of prompts, sampling and evaluation; arms share it so that they pair
    # A convention of `group_advantages`, or none: the rewards as they are, not normalised in their group.
    # Unused with a value model (ppo).
    advantages: str = "paper"
    # turn: of a task of several turns each has advantages from its own rewards (GSPO-token, GSPO Eq. 13)
    advantages_by: str = "response"
    checkpoint_every: int = 10  # steps
    snapshot_every: int | None = None  # steps; models that stay, in snapshots/, for runs that start from one
    # Steps between measurements of drift: the policy's native routing after every update of such a step. 0:
    # never; then there is no load/* either, and π_old's routing is recorded only where replay or the
    # objective needs it.
    drift_every: int = 1
    # bfloat16: sampling, passes and updates under autocast; weights and the cold start stay in float32
    precision: str | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    collapse: CollapseConfig = field(default_factory=CollapseConfig)

    def drift_due(self, step: int) -> bool:
        """Whether the updates of `step` are followed by a measurement of drift."""
        return self.drift_every > 0 and step % self.drift_every == 0

    def evaluation_due(self, step: int) -> bool:
        """Whether the held-out accuracy is measured after `step`."""
        return step == self.steps or step % self.evaluation.every == 0

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is written after `step`."""
        return step == self.steps or step % self.checkpoint_every == 0

    def snapshot_due(self, step: int) -> bool:
        """Whether a model that stays is written after `step`."""
        return self.snapshot_every is not None and step % self.snapshot_every == 0

    def check(self) -> None:
        """Raise `ValueError` for options that contradict each other."""
        for part in (
            self.rollout, self.optim, self.replay, self.intervention, self.mismatch, self.cold_start
        ):  # fmt: skip
            part.check()
        if self.intervention.expert_changes is not None and (
            self.replay.source == "rollout" or self.replay.variant is not None
        ):
            raise ValueError(
                "intervention.expert_changes goes with replay.source null or old_policy and no replay.variant"
            )
        if self.replay.source == "rollout" and self.rollout.refill:
            raise ValueError(
                "rollout.refill joins batches of different widths: not with replay.source=rollout"
            )
        if not self.rollout.recompute:
            self._check_without_recompute()
        if self.drift_every < 0:
            raise ValueError(f"drift_every={self.drift_every}: must be at least 0 (0: never)")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r}: expected null or bfloat16")
        if self.advantages not in (*NORMALISATIONS, "none"):
            known = ", ".join(NORMALISATIONS)
            raise ValueError(f"advantages={self.advantages!r}: expected one of {known}, or none")
        if self.advantages_by not in ("response", "turn"):
            raise ValueError(f"advantages_by={self.advantages_by!r}: expected response or turn")
        if self.advantages_by == "turn" and self.advantages == "none":
            raise ValueError(
                "advantages=none takes the reward of a whole response: not with advantages_by=turn"
            )
        if self.advantages_by == "turn" and self.rollout.refill:
            raise ValueError(
                "rollout.refill looks for a signal in the rewards of whole responses: not with "
                "advantages_by=turn"
            )
        for name, seed in (("seed", self.seed), ("cold_start.seed", self.cold_start.seed)):
            if seed is not None and seed < 0:
                raise ValueError(f"{name}={seed}: must be at least 0 (it numbers a stretch of the problems)")
        for name, value in (
            ("steps", self.steps),
            ("checkpoint_every", self.checkpoint_every),
            ("optim.minibatches", self.optim.minibatches),
            ("optim.epochs", self.optim.epochs),
            ("snapshot_every", self.snapshot_every),
            ("evaluation.every", self.evaluation.every),
            ("evaluation.prompts", self.evaluation.prompts),
            ("cold_start.eval_every", self.cold_start.eval_every),
            ("cold_start.eval_prompts", self.cold_start.eval_prompts),
            ("cold_start.steps", self.cold_start.steps),
            ("cold_start.batch_size", self.cold_start.batch_size),
            ("cold_start.microbatch", self.cold_start.microbatch),
            ("rollout.microbatch", self.rollout.microbatch),
            ("optim.microbatch", self.optim.microbatch),
            ("collapse.window", self.collapse.window),
            ("collapse.patience", self.collapse.patience),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.rollout.prompts % self.optim.minibatches:
            raise ValueError(
                f"rollout.prompts={self.rollout.prompts} is not a multiple of "
                f"optim.minibatches={self.optim.minibatches}: mini-batches hold whole groups of equal number"
            )
        for name, fraction in (
            ("optim.beta1", self.optim.beta1),
            ("optim.beta2", self.optim.beta2),
            ("collapse.fraction", self.collapse.fraction),
        ):
            if not 0 <= fraction < 1:
                raise ValueError(f"{name}={fraction}: expected at least 0 and below 1")
        if self.optim.warmup_updates < 0 or self.cold_start.warmup_steps < 0:
            raise ValueError("optim.warmup_updates and cold_start.warmup_steps must be at least 0")
        for name, number in (
            ("optim.lr", self.optim.lr),
            ("optim.weight_decay", self.optim.weight_decay),
            ("optim.aux_loss_coef", self.optim.aux_loss_coef),
            ("cold_start.lr", self.cold_start.lr),
            ("cold_start.weight_decay", self.cold_start.weight_decay),
        ):
            if not 0 <= number < math.inf:
                raise ValueError(f"{name}={number}: must be a number of at least 0")
        if not self.optim.max_grad_norm > 0:
            raise ValueError(f"optim.max_grad_norm={self.optim.max_grad_norm}: must be above 0")

    def _check_without_recompute(self) -> None:
        if self.replay.source == "old_policy":
            raise ValueError(
                "replay.source=old_policy replays the experts of the old-policy pass, which "
                "rollout.recompute=false leaves out: use replay=rollout, whose experts and log-probabilities "
                "are the sampler's"
            )
        if self.mismatch.correction is not None:
            raise ValueError(
                f"mismatch.correction={self.mismatch.correction} weighs by π_old/μ, which is 1 with "
                "rollout.recompute=false: drop one of the two"
            )
        if self.intervention.expert_changes is not None:
            raise ValueError(
                "intervention.expert_changes swaps the experts of the old-policy pass: not with "
                "rollout.recompute=false"
            )
