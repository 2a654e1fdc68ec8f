"""Integers of any width as a dense string of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPARE_BYTES = 64  # the last group's 64-bit windows reach past its own bytes


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def pack_bits(values_N: NDArray[np.integer[Any]], width: int) -> NDArray[np.uint8]:
    """Values below 2**width, one after the other: value i is bits [i·width, (i + 1)·width), little-endian.

    `width` is 0 to 63. Returns uint8 [⌈N·width / 8⌉]; unused bits of the last byte are zero.
    """
    total = packed_bytes(len(values_N), width)
    if total == 0:
        return np.zeros(0, np.uint8)
    values = values_N.astype(np.uint64)
    while 2 * width <= 56:  # two narrow values are one of twice the width
        values = _pad(values, 2)
        values = values[0::2] | values[1::2] << np.uint64(width)
        width *= 2
    values = _pad(values, 8)  # 8 values begin and end on whole bytes
    groups = len(values) // 8
    out = np.zeros(groups * width + _SPARE_BYTES, np.uint8)
    for j in range(8):
        byte, shift = divmod(j * width, 8)
        word = _strided(out, "<u8", groups, byte, width)
        np.bitwise_or(word, values[j::8] << np.uint64(shift), out=word)
        if shift + width > 64:
            rest = _strided(out, "u1", groups, byte + 8, width)
            rest |= (values[j::8] >> np.uint64(64 - shift)).astype(np.uint8)
    return out[:total]


def unpack_bits(data: NDArray[np.uint8], width: int, count: int) -> NDArray[np.int64]:
    """The inverse of `pack_bits`: int64 [count] from its uint8 bytes."""
    if count == 0 or width == 0:
        return np.zeros(count, np.int64)
    wide = width
    while 2 * wide <= 56:
        wide *= 2
    groups = -(-count * width // (8 * wide))
    padded = np.zeros(groups * wide + _SPARE_BYTES, np.uint8)
    padded[: len(data)] = data
    values = np.empty(groups * 8, np.uint64)
    mask = np.uint64(2**wide - 1)
    for j in range(8):
        byte, shift = divmod(j * wide, 8)
        word = _strided(padded, "<u8", groups, byte, wide) >> np.uint64(shift)
        if shift + wide > 64:
            rest = _strided(padded, "u1", groups, byte + 8, wide)
            word |= rest.astype(np.uint64) << np.uint64(64 - shift)
        np.bitwise_and(word, mask, out=values[j::8])
    while wide > width:
        wide //= 2
        halves = np.empty((len(values), 2), np.uint64)
        np.bitwise_and(values, np.uint64(2**wide - 1), out=halves[:, 0])
        np.right_shift(values, np.uint64(wide), out=halves[:, 1])
        values = halves.reshape(-1)
    return values[:count].view(np.int64)


def _pad(values: NDArray[np.uint64], multiple: int) -> NDArray[np.uint64]:
    missing = -len(values) % multiple
    return np.concatenate([values, np.zeros(missing, np.uint64)]) if missing else values


def _strided(buffer: NDArray[np.uint8], dtype: str, count: int, offset: int, stride: int) -> NDArray[Any]:
    """One item every `stride` bytes, aligned or not. Items do not overlap while stride is at least 8."""
    return np.ndarray((count,), dtype, buffer, offset, (stride,))
