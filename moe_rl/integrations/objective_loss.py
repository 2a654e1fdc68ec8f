"""The loss of one of our objectives inside TRL's trainer, scaled as TRL's own losses are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.integrations.carried import counted_tokens, images, sequences
from moe_rl.integrations.losses import keyword_tensors
from moe_rl.objectives import Objective


class ObjectiveLoss:
    """What `RoutingReplayGRPOTrainer` adds to TRL's `GRPOTrainer` for an objective; mixed in before it."""

    objective: Objective | None
    _said: tuple[Tensor, Tensor] | None  # log-probabilities and entropies [B, C] of the last forward

    args: Any  # from here on TRL's
    model: Any
    accelerator: Any
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    current_gradient_accumulation_steps: int
    _step: int
    _buffered_inputs: Any
    _metrics: dict[str, Any]
    _get_per_token_logps_and_entropies: Any

    def _objective_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The objective's share of the loss of one optimiser step, as TRL's own losses give theirs."""
        assert self.objective is not None
        ids_BT, mask_BT = sequences(inputs)
        logp_BC, entropy_BC, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            ids_BT,
            mask_BT,
            inputs["completion_ids"].shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **images(inputs),
        )
        accumulated = self.current_gradient_accumulation_steps if self.model.training else 1
        loss, _ = self.objective(
            logp_BC,
            inputs.get("old_per_token_logps", logp_BC.detach()),
            inputs["advantages"],
            counted_tokens(inputs),
            sequences=len(logp_BC) * accumulated,
            tokens=inputs.get("tokens_of_step"),
            **keyword_tensors(self.objective, inputs, entropy_BC),
        )
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulated
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]  # TRL's
        if self.objective is None or not self.model.training:
            return inputs
        return inputs | {"tokens_of_step": self._tokens_of_step()}

    def _tokens_of_step(self) -> float:
        """Counted tokens of the optimiser step that is being accumulated, as a mean over processes.

        Gradients are averaged over processes, so that the losses of all add up to the loss of all tokens.
        Where a step spans several rollouts the later ones are not there yet: then the rollout's mean.
        """
        size, at = self.current_gradient_accumulation_steps, self._step % self.args.steps_per_generation
        first, parts = at - at % size, self._buffered_inputs
        if len(parts) % size == 0:
            parts = parts[first : first + size]
        counted = torch.stack([counted_tokens(part).sum() for part in parts]).sum() * (size / len(parts))
        return max(1.0, float(self.accelerator.reduce(counted.float(), "mean")))

    def _rows(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """What the objective was called with, of the forward that has just run."""
        assert self._said is not None
        logp_BC, entropy_BC = self._said
        rows = {
            "logp_BT": logp_BC,
            "old_logp_BT": inputs.get("old_per_token_logps", logp_BC),
            "advantages": inputs["advantages"],
            "mask_BT": counted_tokens(inputs),
        }
        return rows if self.objective is None else rows | keyword_tensors(self.objective, inputs, entropy_BC)
