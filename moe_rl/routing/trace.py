"""RoutingTrace: which experts every token chose, in every MoE layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.routing.content import check_content
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.indexing import Rows, id_dtype, row_indices
from moe_rl.routing.tokens import hash_tokens

if TYPE_CHECKING:
    from moe_rl.routing.storage import TraceFile


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The experts that every token chose.

    experts      integer [B, T, L, K]: logical expert ids, in the order the router returned them; row t is the
                 routing of input position t. Rows that are not valid hold zeros when a recorder made them.
    valid        bool [B, T]: False for padding and for rows that nobody recorded (the last sampled token).
    layer_ids    decoder-layer index of each of the L router calls of one forward, in execution order. An
                 index repeats when a layer has two routers (JetMoe) or a looped model passes it again.
    num_experts  E, with zero and skip experts where a family has them.
    source       where the routing comes from, such as an engine's name.
    weights_version  of the weights that routed, in the count of whoever recorded.
    row_versions int32 [B, T], the same of each row, where a trace holds rows of several (partial rollouts).
    token_hash   int64 [B] on the CPU, `hash_tokens` of the sequences; see `for_tokens`.

    Raises RoutingError when the fields do not fit each other; `validate` checks the ids themselves.
    """

    experts: Tensor
    valid: Tensor
    layer_ids: tuple[int, ...]
    num_experts: int
    source: str | None = None
    weights_version: int | None = None
    token_hash: Tensor | None = None
    row_versions: Tensor | None = None
    _checked: tuple[int, int] | None = field(init=False, repr=False, default=None)

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
        if not len(self.layer_ids) == experts.shape[2] > 0:
            raise RoutingError(
                f"layer_ids must name the {experts.shape[2]} layers of experts [B, T, L, K], "
                f"got {len(self.layer_ids)}: {self.layer_ids}. A trace has at least one layer, and "
                "no dense ones."
            )
        if not 0 < experts.shape[3] <= self.num_experts:
            raise RoutingError(
                f"K = {experts.shape[3]} must be between 1 and num_experts = {self.num_experts}"
            )
        if self.token_hash is not None and (
            self.token_hash.dtype != torch.int64 or self.token_hash.shape != valid.shape[:1]
        ):
            raise RoutingError(
                f"token_hash must be an int64 tensor [B] = {list(valid.shape[:1])} as hash_tokens returns, "
                f"got {self.token_hash.dtype} {list(self.token_hash.shape)}"
            )
        if self.row_versions is not None and (
            self.row_versions.dtype != torch.int32 or self.row_versions.shape != valid.shape
        ):
            raise RoutingError(
                f"row_versions must be an int32 tensor [B, T] = {list(valid.shape)}, "
                f"got {self.row_versions.dtype} {list(self.row_versions.shape)}"
            )

    @property
    def top_k(self) -> int:
        """K, experts per token."""
        return self.experts.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        tensors = (self.experts, self.valid, self.token_hash, self.row_versions)
        return sum(t.nbytes for t in tensors if t is not None)

    def __getitem__(self, rows: Rows) -> RoutingTrace:
        """The same trace for some sequences; an int keeps the batch dimension, a slice copies nothing."""
        index = rows if isinstance(rows, slice) else row_indices(rows, len(self.valid))
        on_device = index if isinstance(index, slice) else index.to(self.experts.device)
        return self._derive(
            experts=self.experts[on_device],
            valid=self.valid[on_device],
            token_hash=None if self.token_hash is None else self.token_hash[index],
            row_versions=self._versions_by(lambda versions_BT: versions_BT[on_device]),
        )

    def where(self, mask_BT: Tensor) -> RoutingTrace:
        """The same trace, valid only where `mask_BT` (bool or 0/1, [B, T]) is true as well, else zeros."""
        if mask_BT.shape != self.valid.shape:
            raise RoutingError(
                f"the mask must be [B, T] = {list(self.valid.shape)}, got {list(mask_BT.shape)}"
            )
        valid = self.valid & mask_BT.to(self.valid.device).bool()
        experts = torch.where(valid[..., None, None], self.experts, self.experts.new_zeros(()))
        return self._derive(experts=experts, valid=valid)

    def columns(self, start: int, stop: int | None = None) -> RoutingTrace:
        """The same trace for the input positions from `start` to before `stop`; drops the token hash."""
        within = slice(start, stop)
        return self._derive(
            experts=self.experts[:, within],
            valid=self.valid[:, within],
            token_hash=None,
            row_versions=self._versions_by(lambda versions_BT: versions_BT[:, within]),
        )

    def gather(self, index: Tensor) -> RoutingTrace:
        """The same rows at other places: int64 [B', T'] of flat indices b T + t; drops the token hash."""
        index = index.to(self.experts.device)
        return self._derive(
            experts=self.experts.flatten(0, 1)[index],
            valid=self.valid.flatten()[index],
            token_hash=None,
            row_versions=self._versions_by(lambda versions_BT: versions_BT.flatten()[index]),
        )

    def fit(self, length: int) -> RoutingTrace:
        """The same trace with T = `length`: cut, or padded on the right with rows that are not valid.

        A cut drops the token hash.
        """
        B, T, L, K = self.experts.shape
        if length == T:
            return self
        if length < T:
            return self.columns(0, length)
        experts = self.experts.new_zeros(B, length, L, K)
        experts[:, :T] = self.experts
        valid = self.valid.new_zeros(B, length)
        valid[:, :T] = self.valid
        padded = self._versions_by(
            lambda versions_BT: nn.functional.pad(versions_BT, (0, length - T), value=-1)
        )
        return self._derive(experts=experts, valid=valid, row_versions=padded)

    @staticmethod
    def cat(traces: Sequence[RoutingTrace], dim: int = 0) -> RoutingTrace:
        """Join traces of one model: sequences (`dim` 0), or rows of the same sequences (1).

        Source and weights version are kept where all agree, row versions where all have them, token hashes
        where all have one and dim is 0.
        Raises RoutingError when layers, E, K or the other dimension differ.
        """
        if not traces:
            raise RoutingError("cat needs at least one trace")
        first, other = traces[0], 1 - dim
        for trace in traces[1:]:
            first.require_same_model(trace)
            if trace.valid.shape[other] != first.valid.shape[other]:
                raise RoutingError(
                    f"traces of {'BT'[other]} = {first.valid.shape[other]} and {trace.valid.shape[other]} "
                    f"cannot be joined along {'BT'[dim]}"
                    + ("; use trace.fit(length) first" if dim == 0 else "")
                )
        hashes = [trace.token_hash for trace in traces if trace.token_hash is not None]
        versions = [trace.row_versions for trace in traces if trace.row_versions is not None]
        joined = replace(
            first,
            experts=torch.cat([trace.experts for trace in traces], dim),
            valid=torch.cat([trace.valid for trace in traces], dim),
            source=_common([trace.source for trace in traces]),
            weights_version=_common([trace.weights_version for trace in traces]),
            token_hash=torch.cat(hashes) if dim == 0 and len(hashes) == len(traces) else None,
            row_versions=torch.cat(versions, dim) if len(versions) == len(traces) else None,
        )
        return joined._trusted() if all(trace._validated for trace in traces) else joined

    def to(self, device: torch.device | str) -> RoutingTrace:
        """The same trace on another device."""
        versions = self._versions_by(lambda versions_BT: versions_BT.to(device))
        return self._derive(
            experts=self.experts.to(device), valid=self.valid.to(device), row_versions=versions
        )

    def compact(self) -> RoutingTrace:
        """The same trace in the smallest dtype that holds its ids, uint8 up to 256 experts."""
        return self.validate()._derive(experts=self.experts.to(id_dtype(self.num_experts)))

    def for_tokens(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> RoutingTrace:
        """The same trace, with the hash of the tokens it routes; `mask_BT` leaves out padding.

        ids_BT are the model's inputs [B, T], the attention mask their `mask_BT`.
        """
        return self._derive(token_hash=self._hash(ids_BT, mask_BT))

    def require_tokens(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> None:
        """Raise RoutingError unless the trace's hash is that of these tokens; no hash, no check."""
        if self.token_hash is None:
            return
        differs_B = self._hash(ids_BT, mask_BT) != self.token_hash
        if bool(differs_B.any()):
            raise RoutingError(
                f"the trace was recorded on other tokens in sequences {differs_B.nonzero()[:, 0].tolist()}: "
                "their order, their padding on the left or their tokens changed since"
            )

    def require_same_model(self, other: RoutingTrace) -> None:
        """Raise RoutingError unless both traces have the same MoE layers, E and K."""
        for name in ("layer_ids", "num_experts", "top_k"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise RoutingError(
                    f"the traces are of different models: {name} is {mine} in one, {theirs} in the other"
                )

    def validate(self) -> RoutingTrace:
        """Check the ids of valid rows once, and again when they were changed in place; return the trace.

        Raises RoutingError for an id outside [0, E), an expert chosen twice by one token, and a layer that is
        zero throughout with K > 1 (what a capture that never ran leaves behind).
        """
        if self._validated:
            return self
        check_content(self.experts, self.valid, self.layer_ids, self.num_experts)
        return self._trusted()

    def save(self, path: str | Path, ordered: bool = True) -> None:
        """Write one safetensors file of the valid rows; the format is in `moe_rl.routing.storage`.

        `ordered` keeps the router's order of the K experts, at K·⌈log2 E⌉ bits per token and layer. Without
        it experts come back in ascending order, at ⌈log2 C(E, K)⌉ bits: enough for every count of drift, but
        a replay with K > 2 is then not bitwise, since the experts' outputs and gate weights are summed in
        another order. Raises RoutingError when `validate` does.
        """
        from moe_rl.routing.storage import write_trace  # which builds on this module

        write_trace(self, Path(path), ordered)

    @staticmethod
    def load(path: str | Path) -> RoutingTrace:
        """Read a trace that `save` wrote. Raises RoutingError for any other file, and a damaged one."""
        return RoutingTrace.open(path)[:]

    @staticmethod
    def open(path: str | Path) -> TraceFile:
        """A trace on disk, sequences of which are read on demand: `RoutingTrace.open(path)[rows]`."""
        from moe_rl.routing.storage import TraceFile

        return TraceFile(path)

    def _hash(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        for name, tensor in (("ids", ids_BT), ("the mask", mask_BT)):
            if tensor is not None and tensor.shape != self.valid.shape:
                raise RoutingError(
                    f"{name} must be [B, T] = {list(self.valid.shape)}, got {list(tensor.shape)}"
                )
        return hash_tokens(ids_BT, mask_BT)

    def _versions_by(self, change: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if self.row_versions is None else change(self.row_versions)

    def _derive(self, **changes: Any) -> RoutingTrace:
        derived = replace(self, **changes)
        return derived._trusted() if self._validated else derived

    def _trusted(self) -> RoutingTrace:
        object.__setattr__(self, "_checked", _versions(self.experts, self.valid))
        return self

    @property
    def _validated(self) -> bool:
        """Whether the ids were checked, and neither tensor was changed in place since."""
        return self._checked is not None and self._checked == _versions(self.experts, self.valid)


def _versions(experts: Tensor, valid: Tensor) -> tuple[int, int]:
    # Tensors made in inference mode count no changes: they cannot be changed outside it.
    experts_version, valid_version = (
        -1 if tensor.is_inference() else tensor._version for tensor in (experts, valid)
    )
    return experts_version, valid_version


def _is_bool(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool


def _common(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None
