"""What happens when a loss, a gradient norm or the policy itself is not finite.

`optim.nonfinite` decides about an update: "stop" ends the run as collapsed, "skip" leaves the update out and
goes on. In both it is not applied, and what it was made from is kept under `nonfinite/` in the run directory.
A policy that has itself become NaN or infinite ends the run under either: no update could mend it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn

from moe_rl.store import RunStore, write_atomic

if TYPE_CHECKING:  # the sampler imports this module
    from moe_rl.training.batch import RolloutBatch
    from moe_rl.training.groups import Groups
    from moe_rl.training.learner import Learner
    from moe_rl.training.passes import OldPolicy
    from moe_rl.training.signal import Signal
    from moe_rl.training.update import Update

KEPT_BATCHES = 8  # files in nonfinite/; what comes later is an event without a file


class CollapseError(RuntimeError):
    """The run met a value that is not finite and ended there; the message starts with "collapsed:"."""


class NonFinitePolicyError(RuntimeError):
    """A policy's next-token distribution is not finite, so nothing can be sampled from it."""


def require_finite(logp_BV: Tensor) -> None:
    """Raise `NonFinitePolicyError` for log-probabilities [B, V] of which a row is NaN.

    One NaN or infinity among a row's logits makes its log-softmax NaN everywhere, so one column tells.
    """
    if logp_BV[:, 0].isnan().any():
        raise NonFinitePolicyError("the policy's logits are NaN or infinite: nothing can be sampled")


@torch.no_grad()
def is_finite(learner: Learner, batch: RolloutBatch | None) -> bool:
    """Whether all trained weights are finite, and what the policy says after one response to each prompt.

    Without a batch, of the weights alone: what the policy says is seen when it is next sampled from.
    """
    if not math.isfinite(nn.utils.get_total_norm(learner.trained.parameters(), norm_type=math.inf).item()):
        return False
    if batch is None:
        return True
    rows_P = torch.arange(0, len(batch), learner.config.rollout.responses)
    for rows in rows_P.split(learner.config.optim.microbatch or len(rows_P)):
        logits_BTV = learner.policy(
            input_ids=batch.input_ids_BT[rows],
            attention_mask=batch.attention_mask_BT[rows],
            use_cache=False,
            logits_to_keep=1,
        ).logits
        if logits_BTV.float().log_softmax(-1).isnan().any():
            return False
    return True


@contextmanager
def collapse_when_sampling(store: RunStore, step: int) -> Iterator[None]:
    """A policy that cannot be sampled from is the run's collapse at this step."""
    try:
        yield
    except NonFinitePolicyError as error:
        raise collapse(store, step, "non-finite policy", str(error)) from error


def collapse(store: RunStore, step: int, reason: str, text: str) -> CollapseError:
    """The error to raise, its event `collapsed` logged; `reason` is in the words of the collapse rule."""
    store.event("collapsed", step=step, reason=reason)
    return CollapseError(f"collapsed: step {step}, {text}")


@dataclass(frozen=True)
class Evidence:
    """What the updates of one step are made from, kept on disk where one of them is not finite."""

    store: RunStore
    step: int
    groups: Groups
    old: OldPolicy
    signal: Signal

    def record(self, update: Update, number: int, action: str) -> None:
        """Log the event `nonfinite_update` of the step's update `number`, with the file of its batch."""
        self.store.event(
            "nonfinite_update",
            step=self.step,
            update=number,
            loss=update.loss,
            grad_norm=update.grad_norm,
            action=action,
            file=self.keep(update, number),
        )

    def keep(self, update: Update, number: int) -> str | None:
        """Write the update's batch; the file's name in the run directory, None once `KEPT_BATCHES` are there.

        A safetensors file of the mini-batch's b rows: `input_ids`, `attention_mask`, `response_mask`, `mask`
        (the tokens that count), `sampler_logp`, `old_logp`, `new_logp` [b, T], `advantages` [b] or [b, T],
        `rewards` [b] as graded.
        """
        name = f"nonfinite/step-{self.step:08d}-update-{number}.safetensors"
        file = self.store.path / name
        file.parent.mkdir(exist_ok=True)
        if not file.exists() and len(list(file.parent.glob("step-*.safetensors"))) >= KEPT_BATCHES:
            return None
        rows, batch, signal = update.rows, self.groups.batch[update.rows], self.signal[update.rows]
        tensors = {
            "input_ids": batch.input_ids_BT,
            "attention_mask": batch.attention_mask_BT,
            "response_mask": batch.response_mask_BT,
            "mask": signal.mask_BT,
            "sampler_logp": batch.sampler_logp_BT,
            "old_logp": self.old.logp_BT[rows],
            "new_logp": update.logp_BT,
            "advantages": signal.advantages,
            "rewards": self.groups.rewards_PG.flatten()[rows],
        }
        # clone: safetensors refuses tensors that share memory, and the two masks may be one
        plain = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        write_atomic(file, save(plain))
        return name

    def collapse_of_update(self, update: Update, number: int) -> CollapseError:
        """The error for an update that `optim.nonfinite=stop` does not let pass."""
        loss, norm = update.loss, update.grad_norm
        reason = "non-finite gradient norm" if math.isfinite(loss) else "non-finite loss"
        text = (
            f"update {number}: loss {loss:g}, gradient norm {norm:g}; the update was not applied, its batch "
            "is in nonfinite/; lower optim.lr, or leave such updates out with optim.nonfinite=skip"
        )
        return collapse(self.store, self.step, reason, text)

    def collapse_of_policy(self, updates: Sequence[Update]) -> CollapseError:
        """The error for a policy that is not finite after the step's updates; the last applied one did it."""
        number = max((n for n, update in enumerate(updates, start=1) if update.finite), default=1)
        update = updates[number - 1]
        if update.finite:
            self.record(update, number, "stop")
        text = (
            f"update {number}: loss {update.loss:g}, gradient norm {update.grad_norm:g}, and the policy is "
            "NaN or infinite after it, which no further update can mend; lower optim.lr"
        )
        return collapse(self.store, self.step, "non-finite policy", text)
