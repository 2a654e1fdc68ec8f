"""The teacher-forced forward: one path of log-probabilities, old and new, of replay and measured routing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.routing import OldWeights, RoutingTrace, Threshold, record_routing, replay_routing
from moe_rl.routing.record import Recorder
from moe_rl.routing.replay import Replay
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.packed import Packing, packing_of


@dataclass(frozen=True)
class Native:
    """Route natively. `record` the trace, and with `weights` the gate weights of its experts."""

    record: bool = False
    weights: bool = False


@dataclass(frozen=True)
class Forced:
    """Replay `trace` [B, T], all or by `Threshold`; `weights_BTLK` are old gate weights to force as well."""

    trace: RoutingTrace
    threshold: Threshold | None = None
    weights_BTLK: Tensor | None = None

    def __getitem__(self, rows: slice) -> Forced:
        """The same for some sequences."""
        weights_BTLK = None if self.weights_BTLK is None else self.weights_BTLK[rows]
        return Forced(self.trace[rows], self.threshold, weights_BTLK)


@dataclass(frozen=True)
class Wanted:
    """What a forward returns beside routing."""

    logits: bool = True
    hidden: bool = False
    router_logits: bool = False


@dataclass(frozen=True)
class Passed:
    """What one forward gave, N the number of response columns; None for what was not asked for.

    logits_BNV           of the rows that score the response columns
    hidden_BND           the last hidden states of the same rows
    router_logits        the routers' scores as the model returns them, [B, T, E] per MoE layer
    native               RoutingTrace [B, T] of the routers' own choice
    used                 RoutingTrace [B, T] of what the experts got: `native`, unless routing was forced
    gate_weights_BTLK    the weights of the experts in `used`, 0 in rows not valid

    The routing of the last column scores nothing: its row may be missing (not valid) in the traces.
    """

    logits_BNV: Tensor | None
    hidden_BND: Tensor | None
    router_logits: tuple[Tensor, ...] | None
    native: RoutingTrace | None
    used: RoutingTrace | None
    gate_weights_BTLK: Tensor | None


def forward(
    model: PreTrainedModel,
    batch: RolloutBatch,
    routing: Native | Forced,
    wanted: Wanted,
    *,
    share_prompts: bool,
) -> Passed:
    """One forward of `model` on a batch, under the given routing.

    With `share_prompts` rows that share a prompt are packed behind one copy of it, where that is cheaper; not
    with router logits: transformers computes its auxiliary loss along with them, and not under a packed mask.
    """
    ids, mask, positions = batch.input_ids_BT, batch.attention_mask_BT, batch.position_ids_BT
    keep = ids.shape[1] - batch.prompt_length + 1
    packing = None
    if share_prompts:
        width = model.config.get_text_config().hidden_size
        packing = batch.once(("packing", width), lambda: packing_of(batch, width))
    if packing is not None:
        ids, positions = packing.pack(ids), packing.pack(positions)
        mask = packing.attention_mask(mask, model.dtype)
        keep = ids.shape[1] - batch.prompt_length + 1
        routing = _packed(routing, packing)
    with _context(model, routing) as context:
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep if wanted.logits else 1,
            output_hidden_states=wanted.hidden,
            # not passed as False: some families do not know it
            **({"output_router_logits": True} if wanted.router_logits else {}),
        )
    native = used = weights_BTLK = router_logits = None
    if isinstance(context, Recorder):
        native = used = context.trace()
        weights_BTLK = context.weights() if isinstance(routing, Native) and routing.weights else None
    elif isinstance(context, Replay):
        native, used = context.native, context.used
    if wanted.router_logits:  # empty for a family that returns none
        found = getattr(output, "router_logits", None) or ()
        router_logits = tuple(scores.view(*ids.shape, -1) for scores in found)
    logits = output.logits if wanted.logits else None
    hidden = output.hidden_states[-1][:, -keep:] if wanted.hidden else None

    if packing is None:
        return Passed(
            None if logits is None else logits[:, :-1],
            None if hidden is None else hidden[:, :-1],
            router_logits, native, used, weights_BTLK,
        )  # fmt: skip
    native, used = (None if t is None else _unpacked(t, packing, batch) for t in (native, used))
    return Passed(
        None if logits is None else packing.unpack_scoring(logits),
        None if hidden is None else packing.unpack_scoring(hidden),
        None,
        native,
        used,
        None if weights_BTLK is None or used is None
        else packing.unpack(weights_BTLK) * used.valid[..., None, None],
    )  # fmt: skip


def _context(
    model: PreTrainedModel, routing: Native | Forced
) -> AbstractContextManager[Recorder | Replay | None]:
    if isinstance(routing, Native):
        return record_routing(model, weights=routing.weights) if routing.record else nullcontext()
    weights = routing.weights_BTLK
    variant = routing.threshold if weights is None else OldWeights(weights)
    return replay_routing(model, routing.trace, variant=variant)


def _packed(routing: Native | Forced, packing: Packing) -> Native | Forced:
    """The routing of the packed rows: where rows share a slot, that of the first of them."""
    if isinstance(routing, Native):
        return routing
    trace, weights = routing.trace.gather(packing.source_PM).where(packing.real_PM), routing.weights_BTLK
    return Forced(trace, routing.threshold, None if weights is None else packing.pack(weights))


def _unpacked(trace: RoutingTrace, packing: Packing, batch: RolloutBatch) -> RoutingTrace:
    """The trace of packed rows, for the whole sequences; the last column has no slot and no routing."""
    has_slot_BT = nn.functional.pad(batch.attention_mask_BT[:, :-1].bool(), (0, 1))
    return trace.gather(packing.place_BT).where(has_slot_BT)
