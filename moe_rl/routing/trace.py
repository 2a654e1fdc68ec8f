"""RoutingTrace: which experts every token chose, in every MoE layer of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "moe_rl.routing_trace"
FORMAT_VERSION = 1
_TOKENS_PER_CHUNK = 16_384  # bounds the memory of content checks


class RoutingError(ValueError):
    """A trace, a model or a forward pass that cannot be recorded or replayed; the text says what to do."""


def id_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype for expert ids below `num_experts` that torch fully supports (uint16 lacks ops)."""
    if num_experts <= 256:
        return torch.uint8
    return torch.int16 if num_experts <= 32_768 else torch.int32


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The experts that every token chose.

    experts      integer [B, T, L, K]: logical expert ids, in the order the router returned them; row t is the
                 routing of input position t. Rows that are not valid hold zeros when a recorder made them.
    valid        bool [B, T]: False for padding and for rows that nobody recorded (the last sampled token).
    layer_ids    decoder-layer index of each of the L router calls of one forward, in execution order. An
                 index repeats when a layer has two routers (JetMoe) or a looped model passes it again.
    num_experts  E, with zero and skip experts where a family has them.

    Raises RoutingError when the fields do not fit each other; `validate` checks the ids themselves.
    """

    experts: Tensor
    valid: Tensor
    layer_ids: tuple[int, ...]
    num_experts: int
    _validated: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(int(layer) for layer in self.layer_ids))
        experts, valid = self.experts, self.valid
        if experts.dim() != 4 or experts.is_floating_point() or experts.is_complex() or _is_bool(experts):
            raise RoutingError(
                f"experts must be an integer tensor [B, T, L, K], got {experts.dtype} {list(experts.shape)}"
            )
        if not _is_bool(valid) or valid.shape != experts.shape[:2]:
            raise RoutingError(
                f"valid must be a bool tensor [B, T] = {list(experts.shape[:2])}, "
                f"got {valid.dtype} {list(valid.shape)}"
            )
        if len(self.layer_ids) != experts.shape[2]:
            raise RoutingError(
                f"layer_ids must name all {experts.shape[2]} layers of experts [B, T, L, K], "
                f"got {len(self.layer_ids)}: {self.layer_ids}. Drop dense layers from experts first."
            )
        if not 0 < experts.shape[3] <= self.num_experts:
            raise RoutingError(
                f"K = {experts.shape[3]} must be between 1 and num_experts = {self.num_experts}"
            )

    @property
    def top_k(self) -> int:
        """K, experts per token."""
        return self.experts.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        return self.experts.nbytes + self.valid.nbytes

    def __getitem__(self, rows: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> RoutingTrace:
        """The same trace for some sequences; an int keeps the batch dimension."""
        if isinstance(rows, slice):
            return self._derive(experts=self.experts[rows], valid=self.valid[rows])
        index = torch.as_tensor(rows, device=self.experts.device).reshape(-1)
        index = index.nonzero().squeeze(1) if _is_bool(index) else index.long()
        B = len(self.valid)
        if index.numel() and not -B <= int(index.min()) <= int(index.max()) < B:
            raise RoutingError(f"sequences {index.tolist()} are not all in a trace of {B} sequences")
        return self._derive(experts=self.experts[index], valid=self.valid[index])

    def where(self, mask_BT: Tensor) -> RoutingTrace:
        """The same trace, valid only where `mask_BT` (bool or 0/1, [B, T]) is true as well, else zeros."""
        if mask_BT.shape != self.valid.shape:
            raise RoutingError(
                f"the mask must be [B, T] = {list(self.valid.shape)}, got {list(mask_BT.shape)}"
            )
        valid = self.valid & mask_BT.to(self.valid.device).bool()
        experts = torch.where(valid[..., None, None], self.experts, self.experts.new_zeros(()))
        return self._derive(experts=experts, valid=valid)

    def fit(self, length: int) -> RoutingTrace:
        """The same trace with T = `length`: cut, or padded on the right with rows that are not valid."""
        B, T, L, K = self.experts.shape
        if length <= T:
            return self._derive(experts=self.experts[:, :length], valid=self.valid[:, :length])
        experts = self.experts.new_zeros(B, length, L, K)
        experts[:, :T] = self.experts
        valid = self.valid.new_zeros(B, length)
        valid[:, :T] = self.valid
        return self._derive(experts=experts, valid=valid)

    @staticmethod
    def cat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Join traces of one model along B. Raises RoutingError when T, layers, E or K differ."""
        if not traces:
            raise RoutingError("cat needs at least one trace")
        first = traces[0]
        for trace in traces[1:]:
            first.require_same_model(trace)
            if trace.valid.shape[1] != first.valid.shape[1]:
                raise RoutingError(
                    f"traces of T = {first.valid.shape[1]} and {trace.valid.shape[1]} rows cannot be joined; "
                    "use trace.fit(length) first"
                )
        joined = replace(
            first,
            experts=torch.cat([trace.experts for trace in traces]),
            valid=torch.cat([trace.valid for trace in traces]),
        )
        return joined._trusted() if all(trace._validated for trace in traces) else joined

    def to(self, device: torch.device | str) -> RoutingTrace:
        """The same trace on another device."""
        return self._derive(experts=self.experts.to(device), valid=self.valid.to(device))

    def require_same_model(self, other: RoutingTrace) -> None:
        """Raise RoutingError unless both traces have the same MoE layers, E and K."""
        for name in ("layer_ids", "num_experts", "top_k"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise RoutingError(
                    f"the traces are of different models: {name} is {mine} in one, {theirs} in the other"
                )

    def validate(self) -> RoutingTrace:
        """Check the ids of valid rows once, and return the trace.

        Raises RoutingError for an id outside [0, E), an expert chosen twice by one token, and a layer that is
        zero throughout with K > 1 (what a capture that never ran leaves behind).
        """
        if self._validated:
            return self
        rows = self.valid.flatten().nonzero().squeeze(1)
        experts_NLK = self.experts.flatten(0, 1)
        nonzero_L = torch.zeros(len(self.layer_ids), dtype=torch.bool, device=rows.device)
        for chunk in rows.split(_TOKENS_PER_CHUNK):
            nonzero_L |= _check_ids(experts_NLK[chunk], self.num_experts, self.layer_ids)
        if self.top_k > 1 and rows.numel() and not bool(nonzero_L.all()):
            layer = self.layer_ids[int((~nonzero_L).nonzero()[0])]
            raise RoutingError(
                f"layer {layer} holds expert 0 in every slot of every valid row: nothing was captured there. "
                "Drop dense layers from the trace, or check that the recording hook ran."
            )
        if self.top_k > 1:
            for chunk in rows.split(_TOKENS_PER_CHUNK):
                _check_duplicates(experts_NLK[chunk], self.layer_ids)
        return self._trusted()

    def save(self, path: str | Path) -> None:
        """Write one compact safetensors file; `load` reads it back."""
        header = {
            "version": FORMAT_VERSION,
            "layer_ids": self.layer_ids,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
        }
        self.validate()  # narrowing the dtype would hide an id out of range
        tensors = {
            "experts": self.experts.to("cpu", id_dtype(self.num_experts)).contiguous(),
            "valid": self.valid.cpu().contiguous(),
        }
        save_file(tensors, path, metadata={FORMAT: json.dumps(header)})

    @staticmethod
    def load(path: str | Path) -> RoutingTrace:
        """Read a trace that `save` wrote. Raises RoutingError for any other file."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if FORMAT not in metadata:
                    raise RoutingError(f"{path} is a safetensors file, but not a routing trace")
                header = json.loads(metadata[FORMAT])
                if header.get("version") != FORMAT_VERSION:
                    raise RoutingError(
                        f"{path} is a routing trace of format {header.get('version')}; this version reads "
                        f"{FORMAT_VERSION}"
                    )
                experts, valid = file.get_tensor("experts"), file.get_tensor("valid")
                trace = RoutingTrace(experts, valid, tuple(header["layer_ids"]), header["num_experts"])
        except (SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise RoutingError(f"{path} is not a routing trace: {error}") from error
        if trace.top_k != header.get("top_k"):
            raise RoutingError(
                f"{path} is damaged: its header says K = {header.get('top_k')}, its rows {trace.top_k}"
            )
        return trace.validate()

    def _derive(self, **changes: Any) -> RoutingTrace:
        derived = replace(self, **changes)
        return derived._trusted() if self._validated else derived

    def _trusted(self) -> RoutingTrace:
        object.__setattr__(self, "_validated", True)
        return self


def _is_bool(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool


def _check_ids(experts_NLK: Tensor, num_experts: int, layer_ids: tuple[int, ...]) -> Tensor:
    """Raise for ids out of range; bool [L], whether a layer holds an id other than 0."""
    ids = experts_NLK.to(torch.int64)  # uint16 has no comparisons
    outside_L = ((ids < 0) | (ids >= num_experts)).any(dim=2).any(dim=0)
    if bool(outside_L.any()):
        layer = int(outside_L.nonzero()[0])
        low, high = int(ids[:, layer].min()), int(ids[:, layer].max())
        raise RoutingError(
            f"expert ids must lie in [0, {num_experts}), layer {layer_ids[layer]} holds {low} to {high}. "
            "Mark rows without routing as not valid; a wrong num_experts has the same effect."
        )
    return (ids != 0).any(dim=2).any(dim=0)


def _check_duplicates(experts_NLK: Tensor, layer_ids: tuple[int, ...]) -> None:
    ids = experts_NLK.to(torch.int64).sort(dim=2).values
    duplicate_L = (ids[..., 1:] == ids[..., :-1]).any(dim=2).any(dim=0)
    if bool(duplicate_L.any()):
        layer = int(duplicate_L.nonzero()[0])
        raise RoutingError(
            f"a token chose the same expert twice in layer {layer_ids[layer]}; ids in a row must be "
            "distinct. Mark padding and unrecorded rows as not valid."
        )
