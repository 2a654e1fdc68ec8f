"""How many bytes routing takes, from a model's topology alone: what `RoutingTrace` and its file measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.routing.storage import RowCode
from moe_rl.routing.trace import id_dtype


@dataclass(frozen=True)
class TraceSize:
    """Sizes of traces of a model with L MoE layers, E experts and K experts per token.

    Of the file they leave out the safetensors header (under 1 KB, and at most 7 bytes a layer), of both a
    token hash (8 bytes a sequence) and row versions (4 bytes a row), where a trace has them.
    """

    layers: int
    num_experts: int
    top_k: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes a row takes in memory, valid or not: L K ids and its validity."""
        return self.layers * self.top_k * id_dtype(self.num_experts).itemsize + 1

    def file_bytes_per_token(self, ordered: bool = True) -> float:
        """Bytes a valid row takes on disk: L times K ⌈log2 E⌉ bits in the router's order, as a set about
        ⌈log2 C(E, K)⌉ bits, and its validity bit."""
        code = RowCode(self.num_experts, self.top_k, ordered)
        return (self.layers * code.fields * code.width + 1) / 8

    def file_bytes(self, rows: Sequence[int], length: int, ordered: bool = True) -> int:
        """Bytes of the tensors of a file: sequences of T = `length`, `rows` of them valid in each."""
        code = RowCode(self.num_experts, self.top_k, ordered)
        experts = sum(code.packed_bytes(count * self.layers) for count in rows)
        return experts + len(rows) * -(-length // 8) + 4 * max(len(rows), 1)
