"""TRL's GRPOTrainer with routing record, replay and measurement; this is the one file that imports TRL.

    from moe_rl.integrations.trl import RoutingReplayGRPOTrainer

    trainer = RoutingReplayGRPOTrainer(
        model=model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=prompts, replay="old_policy"
    )
    trainer.train()

docs/trl.md says what is recorded when, and what else differs from TRL's own trainer. Private methods of
TRL 1.16.0 are overridden, so another version may need another trainer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.integrations.carried import (
    FORCED,
    OLD,
    Layout,
    images,
    sequences,
    take_trace,
)
from moe_rl.integrations.losses import objective_of, require_supported
from moe_rl.integrations.objective_loss import ObjectiveLoss
from moe_rl.integrations.pool import LossPass, MetricPool, change, change_metrics
from moe_rl.integrations.rollout import RolloutRouting
from moe_rl.integrations.sampled import (
    from_engine,
    from_recorder,
    outputs_of,
    own_share,
    payloads_of,
    returning_routed_experts,
)
from moe_rl.integrations.saved_weights import load_saved_weights
from moe_rl.objectives import NORMALISATIONS, Objective, group_advantages
from moe_rl.routing import (
    ExpertChange,
    RoutingError,
    find_routers,
    record_routing,
    replay_routing,
)
from moe_rl.routing.formats import ModelRouting

try:
    import trl
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from trl.models.utils import disable_gradient_checkpointing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"moe_rl.integrations.trl needs TRL ({error}): pip install -c constraints.txt -e '.[trl]'"
    ) from error

__all__ = ["GRPOConfig", "RoutingReplayGRPOTrainer", "trl"]

logger = logging.getLogger(__name__)
SOURCES = (None, "old_policy", "rollout")


class RoutingReplayGRPOTrainer(ObjectiveLoss, GRPOTrainer):
    """`trl.GRPOTrainer` for MoE models: every argument of it, and

    replay      "old_policy" (R2, GSPO paper 5.3): the loss is forced onto the experts that π_old chose in the
                pass of its log-probabilities. "rollout" (R3, 2510.11370): that pass and the loss are forced
                onto the sampler's experts. None: native routing.
    objective   one of `moe_rl.objectives` instead of `args.loss_type`, with clipping and KL of its own
    advantages  a convention of `group_advantages` instead of `args.scale_rewards`
    drift       without replay: measure how far the policy's routing is from π_old's all the same, in the
                forward of the loss; False records nothing

    Beside TRL's metrics it logs clip_frac/…, ratio/…, kl/… (the glossary is in docs/objectives.md), drift/old
    and, with replay, replay/overridden: over all rows of all micro-batches and processes since the last log.

    TRL adds a model's own load-balancing loss unasked; here it is off unless `args.router_aux_loss_coef` is
    set. Raises ValueError for options that exclude each other, RoutingError for a dense model, and where a
    replay would be incomplete or on other tokens than were recorded.
    """

    rollout_func: Callable[..., dict[str, Any]] | None

    def __init__(
        self,
        *arguments: Any,
        replay: str | None = None,
        objective: Objective | None = None,
        advantages: str | None = None,
        drift: bool = True,
        **options: Any,
    ) -> None:
        if replay not in SOURCES:
            raise ValueError(f"replay={replay!r}: expected one of {SOURCES}")
        if advantages not in (None, *NORMALISATIONS):
            raise ValueError(f"advantages={advantages!r}: expected None or one of {NORMALISATIONS}")
        if objective is not None and not isinstance(objective, Objective):
            raise ValueError(
                f"objective={objective!r}: expected get_objective(name, ...) of moe_rl.objectives"
            )
        self.replay, self.objective, self._normalise = replay, objective, advantages
        self._records = drift or replay is not None
        self._layout: Layout | None = None
        self._rollout = RolloutRouting(replay)
        self._rewards: Tensor | None = None
        self._until_backward: contextlib.ExitStack | None = None
        self._said = None
        with returning_routed_experts(vllm_generation) if replay == "rollout" else contextlib.nullcontext():
            super().__init__(*arguments, **options)
        if self._records:
            find_routers(self.model)  # a dense model is refused here, not after the first rollout
        if objective is not None:
            require_supported(objective, self.args)
        self.pool = MetricPool(objective_of(self.args) if objective is None else objective)
        self._leave_out_unasked_aux_loss()
        if replay == "rollout":
            self._prepare_rollout_source()

    def _leave_out_unasked_aux_loss(self) -> None:
        if self.args.router_aux_loss_coef is None and self.aux_loss_enabled:
            logger.warning(
                "the model's config has router_aux_loss_coef=%g, which TRL would add to the loss; it is off "
                "here: pass GRPOConfig(router_aux_loss_coef=...) to have it",
                self.router_aux_loss_coef,
            )
            self.aux_loss_enabled, self.router_aux_loss_coef = False, 0.0

    def _prepare_rollout_source(self) -> None:
        if self.rollout_func is not None:
            self.rollout_func = self._noting_payloads(self.rollout_func)
        elif self.use_vllm and self.vllm_mode != "colocate":
            raise ValueError(
                f"replay='rollout' with vllm_mode={self.vllm_mode!r}: TRL's server returns no routed "
                "experts; use vllm_mode='colocate', or a rollout_func that returns 'routed_experts'"
            )
        elif self.use_transformers_continuous_batching:
            raise ValueError("replay='rollout' cannot record use_transformers_continuous_batching=True")
        elif self.tools:
            raise ValueError("replay='rollout' with tools: several turns of generation are no single trace")

    # The rollout: the sampler's routing, the old-policy pass, what travels with the batch.

    def _noting_payloads(self, rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = rollout_func(prompts, trainer)
            self._note_payloads(payloads_of(output), output["prompt_ids"], output["completion_ids"])
            return output

        return rollout

    def _note_payloads(self, payloads: list[Any], prompt_ids: Any, completion_ids: Any) -> None:
        routing = ModelRouting.from_model(self.model)
        self._rollout.sampled = from_engine(payloads, routing, prompt_ids, completion_ids)

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        if self.replay != "rollout" or not self.model.training:
            return super()._generate_single_turn(prompt_ids, *arguments, **options)
        if not self.use_vllm:
            with record_routing(self.model) as recorder:
                generated = super()._generate_single_turn(prompt_ids, *arguments, **options)
            self._rollout.sampled = from_recorder(recorder)
            return generated
        engine = self.vllm_generation
        with outputs_of(engine.llm) as outputs:
            generated = super()._generate_single_turn(prompt_ids, *arguments, **options)
        payloads = own_share(outputs, engine.tensor_parallel_size, self.accelerator.process_index)
        self._note_payloads(payloads, prompt_ids, generated[0])
        return generated

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Any:
        rewards_BF = super()._calculate_rewards(*arguments, **options)  # of all processes and functions
        weighted_BF = rewards_BF * self.reward_weights.to(rewards_BF.device)
        self._rewards = weighted_BF.nansum(-1).masked_fill(weighted_BF.isnan().all(-1), torch.nan)
        return rewards_BF

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        due = self._records and self._trl_scores_old_policy
        self._rollout = RolloutRouting(self.replay, pass_due=due)
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._normalise is not None:
            batch["advantages"] = self._group_advantages(self._normalise, len(inputs))
        if self._records:
            self._carry_routing(batch)
        return batch

    @property
    def _trl_scores_old_policy(self) -> bool:
        """Whether TRL computes π_old's log-probabilities itself: not where its updates are on-policy."""
        rounds = self.args.steps_per_generation * self.num_iterations
        off_policy = self.args.gradient_accumulation_steps % rounds != 0
        return off_policy or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _group_advantages(self, normalise: str, size: int) -> Tensor:
        assert self._rewards is not None
        if self._rewards.isnan().any():
            raise ValueError(
                f"advantages={normalise!r}: {int(self._rewards.isnan().sum())} completions got None or NaN "
                "from every reward function: give each a number, or use advantages=None, which skips them"
            )
        advantages_B = group_advantages(self._rewards, self.num_generations, normalise=normalise)
        return advantages_B[self.accelerator.process_index * size :][:size]

    def _carry_routing(self, batch: dict[str, Any]) -> None:
        """Have π_old's routing travel with the batch; its pass is run here where TRL leaves it out."""
        rollout = self._rollout
        if rollout.old is None:
            options = self.args.gradient_checkpointing_kwargs
            with torch.no_grad(), disable_gradient_checkpointing(self.model, options):
                rollout.old_policy_pass(
                    super()._get_per_token_logps_and_entropies,
                    self.model,
                    *sequences(batch),
                    batch["completion_ids"].shape[1],
                    self.args.per_device_train_batch_size,
                    **images(batch),
                )
        elif batch.get("old_per_token_logps") is not rollout.logp:
            raise RoutingError(
                "TRL's old log-probabilities are not of the pass whose routing was recorded: this trainer is "
                f"written for TRL 1.16.0, and {trl.__version__} is installed"
            )
        rollout.put_into(batch)
        assert rollout.old is not None
        self._layout = Layout.of(rollout.old)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        score = super()._get_per_token_logps_and_entropies
        if self._rollout.pass_due:
            self._rollout.pass_due = False
            return self._rollout.old_policy_pass(score, *arguments, **options), None, None
        said = score(*arguments, **options)
        self._said = said[:2]
        return said

    # The loss: replay until after backward, the objective, what is measured.

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        # Replay stays open until backward is through: gradient checkpointing routes again there.
        with contextlib.ExitStack() as self._until_backward:
            loss: Tensor = super().training_step(*arguments, **options)
        self._until_backward = None
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss_of = super()._compute_loss if self.objective is None else self._objective_loss
        if self._until_backward is None:  # evaluation: nothing is recorded, replayed or measured
            loss: Tensor = loss_of(model, inputs)
            return loss
        changes: dict[str, ExpertChange] = {}
        if not self._records:
            loss = loss_of(model, inputs)
        else:
            assert self._layout is not None
            old = take_trace(inputs, OLD, self._layout)
            if self.replay is None:
                recorder = self._until_backward.enter_context(record_routing(model))
                loss = loss_of(model, inputs)
                changes["drift/old"] = change(old, recorder.trace(), inputs)
            else:
                forced = old if self.replay == "old_policy" else take_trace(inputs, FORCED, self._layout)
                replay = self._until_backward.enter_context(replay_routing(model, forced))
                loss = loss_of(model, inputs)
                changes["drift/old"] = change(old, replay.native, inputs)
                changes["replay/overridden"] = change(forced, replay.native, inputs)
        self.observe(LossPass(self._rows(inputs), changes))
        return loss

    # Checkpoints: transformers leaves fused experts out when it resumes.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_experts_too(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_experts_too(self.state.best_model_checkpoint, self.model)

    def _load_experts_too(self, folder: str, model: nn.Module) -> None:
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # these save and load tensors as they are
            load_saved_weights(model, folder)

    def observe(self, seen: LossPass) -> None:
        """One loss pass has been made; a subclass may look at it too."""
        self.pool.add(seen)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and len(self.pool):
            metrics, changes = self.pool.reduce(self.accelerator)
            for name, value in (metrics | change_metrics(changes)).items():
                self._metrics["train"][name].append(value)
        super().log(logs, start_time)
