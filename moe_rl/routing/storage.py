"""The file of a RoutingTrace: one safetensors file, packed bit by bit, read sequence by sequence.

Metadata `moe_rl.routing_trace` is a JSON header; the tensors are

    experts   uint8 [bytes]: of every sequence its valid rows, layer by layer, from a whole byte on. A row of
              a layer is K ids of ⌈log2 E⌉ bits in the router's order, or the rank of its set (`SubsetCode`)
    valid     uint8 [B, ⌈T / 8⌉]: validity, bit t % 8 of byte t // 8
    checksum  uint32 [B]: CRC-32 of header, validity, token hash, row versions and experts of every sequence;
              of a trace without sequences uint32 [1], of its header
    token_hash  int64 [B], where the trace has one
    row_versions  int32 [B, T], where the trace has them

Rows that are not valid cost their validity bit, and are zeros when read.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moe_rl.routing.packing import pack_bits, packed_bytes, unpack_bits
from moe_rl.routing.subsets import Integers, SubsetCode, subset_code
from moe_rl.routing.trace import RoutingError, RoutingTrace, Rows, id_dtype, row_indices

FORMAT = "moe_rl.routing_trace"
FORMAT_VERSION = 2
MAX_EXPERTS = 1 << 16  # a header beyond is damage; the sizes of its sets alone could take minutes
_CHUNK = 8_192  # token-layers packed at a time, a multiple of 8: temporaries stay in the cache


class RowCode:
    """Experts of token-layers as bits: ids in order, or ranks of sets.

    fields, width   a token-layer is `fields` numbers of `width` bits
    """

    def __init__(self, num_experts: int, top_k: int, ordered: bool) -> None:
        self._top_k = top_k
        self._dtype = _numpy_dtype(num_experts)
        self._sets: SubsetCode | None = None if ordered else subset_code(num_experts, top_k)
        if self._sets is None:
            self.fields, self.width = top_k, (num_experts - 1).bit_length()
        else:
            self.fields, self.width = self._sets.fields, self._sets.width

    def packed_bytes(self, count: int) -> int:
        """Bytes of `count` token-layers."""
        return packed_bytes(count * self.fields, self.width)

    def pack(self, experts_NK: Integers) -> NDArray[np.uint8]:
        """uint8 [bytes] from ids [N, K] that were validated."""
        return np.concatenate(
            [np.zeros(0, np.uint8)]
            + [
                pack_bits(self._numbers(experts_NK[i : i + _CHUNK]), self.width)
                for i in range(0, len(experts_NK), _CHUNK)
            ]
        )

    def unpack(self, data: NDArray[np.uint8], count: int) -> Integers:
        """ids [count, K] in the smallest dtype. Raises RoutingError for bits that are no set of experts."""
        experts_NK = np.empty((count, self._top_k), self._dtype)
        for i in range(0, count, _CHUNK):
            chunk_NK = experts_NK[i : i + _CHUNK]
            start, stop = self.packed_bytes(i), self.packed_bytes(i + len(chunk_NK))
            numbers = unpack_bits(data[start:stop], self.width, len(chunk_NK) * self.fields)
            numbers_NF = numbers.reshape(-1, self.fields)
            if self._sets is None:
                chunk_NK[:] = numbers_NF
                continue
            rank_FN = np.ascontiguousarray(numbers_NF.T)
            if not self._sets.is_rank(rank_FN):
                raise RoutingError("a number of a set is too large, so the data are damaged")
            chunk_KN = np.empty((self._top_k, len(chunk_NK)), self._dtype)
            self._sets.unrank(rank_FN, chunk_KN)
            chunk_NK[:] = chunk_KN.T
        return experts_NK

    def _numbers(self, experts_NK: Integers) -> Integers:
        if self._sets is None:
            return experts_NK.reshape(-1)
        return self._sets.rank(np.ascontiguousarray(experts_NK.T)).T.reshape(-1)


def write_trace(trace: RoutingTrace, path: Path, ordered: bool) -> None:
    """Write `trace` in one step: a reader sees the old file or the new, never a part."""
    trace = trace.compact()
    if trace.num_experts > MAX_EXPERTS:
        raise RoutingError(f"a file holds traces of up to {MAX_EXPERTS} experts, got {trace.num_experts}")
    B, T = trace.valid.shape
    header = {
        "version": FORMAT_VERSION,
        "shape": [B, T],
        "layer_ids": trace.layer_ids,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "ordered": ordered,
        "source": trace.source,
        "weights_version": trace.weights_version,
    }
    code = RowCode(trace.num_experts, trace.top_k, ordered)
    valid_BT = trace.valid.cpu().numpy()
    hash_B = None if trace.token_hash is None else trace.token_hash.numpy()
    versions_BT = None if trace.row_versions is None else trace.row_versions.cpu().contiguous().numpy()
    tensors = {"valid": np.packbits(valid_BT, axis=1, bitorder="little")}
    packed = [np.zeros(0, np.uint8)]
    for b in range(B):
        rows_NLK = trace.experts[b][trace.valid[b]].cpu()
        packed.append(code.pack(rows_NLK.flatten(0, 1).numpy()))
    text = json.dumps(header, separators=(",", ":"))
    checksums = [
        _checksum(text, tensors["valid"][b], hash_B, versions_BT, b, packed[b + 1]) for b in range(B)
    ]
    checksums = checksums or [zlib.crc32(text.encode())]
    tensors |= {"experts": np.concatenate(packed), "checksum": np.array(checksums, np.uint32)}
    if hash_B is not None:
        tensors["token_hash"] = hash_B
    if versions_BT is not None:
        tensors["row_versions"] = versions_BT
    _replace_file(path, tensors, text)


class TraceFile:
    """A trace on disk, of which sequences are read when they are asked for.

    file = RoutingTrace.open(path)
    for b in range(0, len(file), 8):
        trace = file[b : b + 8]      # a RoutingTrace; memory holds these sequences only

    shape        (B, T)
    valid        bool [B, T], held in memory
    ordered      whether experts keep the router's order; ascending ids otherwise
    layer_ids, num_experts, top_k, source, weights_version   as in RoutingTrace

    The file is memory-mapped. Raises RoutingError for a file that is no trace, cut short or altered: at once
    where the header tells, else when the damaged sequence is read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = safe_open(self.path, framework="np")
            self._text = _header_text(self.path, self._file.metadata() or {})
            self._read_header(json.loads(self._text))
        except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if isinstance(error, RoutingError):
                raise
            raise RoutingError(f"{self.path} is not a routing trace, or damaged: {error}") from error

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Rows) -> RoutingTrace:
        """Read some sequences; the same indices as on a RoutingTrace."""
        try:
            trace = self._read(row_indices(rows, len(self)).tolist())
            # Ranks below C(E, K) are sets of distinct ids below E, so there is nothing left to check.
            return trace.validate() if self.ordered else trace._trusted()
        except RoutingError as error:
            raise RoutingError(f"{self.path}: {error}") from error

    def _read(self, index_B: list[int]) -> RoutingTrace:
        valid_BT = self.valid[index_B]
        shape = (*valid_BT.shape, len(self.layer_ids), self.top_k)
        experts_BTLK = torch.zeros(shape, dtype=id_dtype(self.num_experts))
        for place, b in enumerate(index_B):
            experts_BTLK[place, valid_BT[place]] = self._read_sequence(b)
        return RoutingTrace(
            experts_BTLK,
            valid_BT,
            self.layer_ids,
            self.num_experts,
            source=self.source,
            weights_version=self.weights_version,
            token_hash=None if self._hash_B is None else torch.from_numpy(self._hash_B[index_B]),
            row_versions=None if self._versions_BT is None else torch.from_numpy(self._versions_BT[index_B]),
        )

    def _read_header(self, header: dict[str, Any]) -> None:
        if header["version"] != FORMAT_VERSION:
            raise RoutingError(
                f"{self.path} is a routing trace of format {header['version']}; this version reads "
                f"{FORMAT_VERSION}"
            )
        _require_header(header)
        B, T = self.shape = tuple(header["shape"])
        self.layer_ids = tuple(header["layer_ids"])
        self.num_experts, self.top_k = header["num_experts"], header["top_k"]
        self.ordered: bool = header["ordered"]
        self.source: str | None = header["source"]
        self.weights_version: int | None = header["weights_version"]
        self._code = RowCode(self.num_experts, self.top_k, self.ordered)
        self._bits_BT = self._tensor("valid", (B, -(-T // 8)), np.uint8)
        self._checksum_B = self._tensor("checksum", (max(B, 1),), np.uint32)
        if B == 0 and zlib.crc32(self._text.encode()) != self._checksum_B[0]:
            raise RoutingError(f"{self.path} is damaged: the checksum of its header does not match")
        names = set(self._file.keys())
        self._hash_B = self._tensor("token_hash", (B,), np.int64) if "token_hash" in names else None
        versioned = "row_versions" in names
        self._versions_BT = self._tensor("row_versions", (B, T), np.int32) if versioned else None
        self.valid = torch.from_numpy(
            np.unpackbits(self._bits_BT, axis=1, count=T, bitorder="little").view(bool)
        )
        counts = self.valid.sum(1).tolist()
        sizes = [self._code.packed_bytes(count * len(self.layer_ids)) for count in counts]
        self._counts, self._offsets = counts, np.cumsum([0, *sizes]).tolist()
        if self._file.get_slice("experts").get_shape() != [self._offsets[-1]]:
            raise RoutingError(f"{self.path} is damaged: its experts do not fill the rows that are valid")

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array = self._file.get_tensor(name)
        if array.shape != shape or array.dtype != dtype:
            raise RoutingError(
                f"{self.path} is damaged: {name} should be {np.dtype(dtype)} {list(shape)}, is {array.dtype} "
                f"{list(array.shape)}"
            )
        return array

    def _read_sequence(self, b: int) -> torch.Tensor:
        """ids [N, L, K] of the N valid rows."""
        start, stop = self._offsets[b], self._offsets[b + 1]
        # safetensors refuses an empty slice at the end
        data = self._file.get_slice("experts")[start:stop] if start < stop else np.zeros(0, np.uint8)
        found = _checksum(self._text, self._bits_BT[b], self._hash_B, self._versions_BT, b, data)
        if found != self._checksum_B[b]:
            raise RoutingError(f"the file is damaged: the checksum of sequence {b} does not match")
        L = len(self.layer_ids)
        experts_NK = self._code.unpack(data, self._counts[b] * L)
        return torch.from_numpy(experts_NK).view(self._counts[b], L, self.top_k)


def _require_header(header: dict[str, Any]) -> None:
    """Raise RoutingError for a value that no trace has; a wrong type would fail wherever it is used."""
    for name, least, size in (("shape", 0, 2), ("layer_ids", 0, None)):
        numbers = header[name]
        if not isinstance(numbers, list) or not all(_is_count(n, least) for n in numbers):
            raise RoutingError(f"not a routing trace, or damaged: {name} must list integers, is {numbers!r}")
        if len(numbers) != size and size is not None:
            raise RoutingError(f"not a routing trace, or damaged: {name} must be [B, T], is {numbers}")
    for name, fits in {
        "num_experts": _is_count(header["num_experts"], 1) and header["num_experts"] <= MAX_EXPERTS,
        "top_k": _is_count(header["top_k"], 1),
        "ordered": isinstance(header["ordered"], bool),
        "source": isinstance(header["source"], str | None),
        "weights_version": header["weights_version"] is None or type(header["weights_version"]) is int,
    }.items():
        if not fits:
            raise RoutingError(f"not a routing trace, or damaged: {name} cannot be {header[name]!r}")
    if header["top_k"] > header["num_experts"]:
        raise RoutingError(
            f"not a routing trace, or damaged: {header['top_k']} of {header['num_experts']} experts"
        )


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 31


def _header_text(path: Path, metadata: dict[str, str]) -> str:
    if FORMAT not in metadata:
        raise RoutingError(f"{path} is a safetensors file, but not a routing trace")
    return metadata[FORMAT]


def _checksum(
    header: str,
    bits_T: NDArray[np.uint8],
    hash_B: NDArray[np.int64] | None,
    versions_BT: NDArray[np.int32] | None,
    b: int,
    data: NDArray[np.uint8],
) -> int:
    parts: Sequence[bytes | NDArray[Any]] = (
        header.encode(),
        bits_T,
        b"" if hash_B is None else hash_B[b : b + 1],
        b"" if versions_BT is None else versions_BT[b],
    )
    value = 0
    for part in (*parts, data):
        value = zlib.crc32(part, value)  # type: ignore[arg-type]  # an array is a buffer
    return value


def _replace_file(path: Path, tensors: dict[str, NDArray[Any]], header: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary, metadata={FORMAT: header})
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _numpy_dtype(num_experts: int) -> np.dtype[Any]:
    return np.dtype(str(id_dtype(num_experts)).removeprefix("torch."))
