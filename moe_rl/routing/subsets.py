"""Sets of K of E experts as numbers: the combinatorial number system."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]


class SubsetCode:
    """Numbers the sets of K of E experts from 0 to C(E, K) - 1, in as few bits as hold that.

    The rank of c_1 < ... < c_K is Σ C(c_i, i) (Knuth, TAOCP 4A, 7.2.1.3, theorem L). Ranks of more than 63
    bits are split into several fields of equal width, the lowest first.

    bits     ⌈log2 C(E, K)⌉
    fields   F, 1 up to 63 bits
    width    bits of a field; fields · width is at most bits + fields - 1
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.bits = (comb(num_experts, top_k) - 1).bit_length()
        # Sums of K fields must not overflow, hence room above the width when there are several.
        self.fields = 1 if self.bits <= 63 else -(-self.bits // 48)
        self.width = -(-self.bits // self.fields)

    # The tables are built when a set is first coded: reading a damaged header must cost nothing.
    @functools.cached_property
    def _size(self) -> NDArray[np.int64]:
        return self._split([comb(self.num_experts, self.top_k)])

    @functools.cached_property
    def _binomials(self) -> list[NDArray[np.int64]]:
        # c_i is at most E - K + i - 1: binomials above C(E, K) are never added, and would not fit the fields.
        size = comb(self.num_experts, self.top_k)
        return [
            self._split([min(comb(c, i), size) for c in range(self.num_experts + 1)])
            for i in range(1, self.top_k + 1)
        ]

    @functools.cached_property
    def _guesses(self) -> list[_GuessTable]:
        return [_GuessTable(self.num_experts, i) for i in range(2, self.top_k + 1)]

    def rank(self, experts_KN: Integers) -> NDArray[np.int64]:
        """int64 [F, N] from distinct ids [K, N] in any order."""
        sorted_KN = sort_columns(experts_KN)
        rank_FN = np.zeros((self.fields, experts_KN.shape[1]), np.int64)
        for column_N, binomial_FE in zip(sorted_KN, self._binomials, strict=True):
            for rank_N, binomial_E in zip(rank_FN, binomial_FE, strict=True):
                rank_N += binomial_E.take(column_N)
        for low, high in itertools.pairwise(rank_FN):
            high += low >> self.width
            low &= (1 << self.width) - 1
        return rank_FN

    def is_rank(self, rank_FN: NDArray[np.int64]) -> bool:
        """Whether every number is below C(E, K), so that `unrank` is defined for it."""
        at_least_N = _at_least(rank_FN, self._size, np.zeros(rank_FN.shape[1], np.intp))
        return not at_least_N.any()

    def unrank(self, rank_FN: NDArray[np.int64], out_KN: Integers) -> None:
        """Write the sets, ids ascending along K, to `out_KN`."""
        rest_FN = rank_FN.copy()
        for i in range(self.top_k, 1, -1):
            binomial_FE = self._binomials[i - 1]
            c_N = self._guesses[i - 2].guess(self._as_float(rest_FN))
            c_N += _at_least(rest_FN, binomial_FE, c_N + 1)
            out_KN[i - 1] = c_N
            for rest_N, binomial_E in zip(rest_FN, binomial_FE, strict=True):
                rest_N -= binomial_E.take(c_N)
            for low, high in itertools.pairwise(rest_FN):
                high += low >> self.width  # -1 where the field below must borrow
                low &= (1 << self.width) - 1
        out_KN[0] = rest_FN[0]

    def _split(self, numbers: list[int]) -> NDArray[np.int64]:
        """int64 [F, len(numbers)]."""
        last = self.fields - 1
        mask = (1 << self.width) - 1
        split = [
            [n >> f * self.width if f == last else (n >> f * self.width) & mask for n in numbers]
            for f in range(self.fields)
        ]
        return np.array(split, np.int64)

    def _as_float(self, rank_FN: NDArray[np.int64]) -> NDArray[np.float64]:
        value_N = rank_FN[-1].astype(np.float64)
        for rank_N in rank_FN[-2::-1]:
            value_N *= 2.0**self.width
            value_N += rank_N
        return value_N


@functools.lru_cache(maxsize=8)
def subset_code(num_experts: int, top_k: int) -> SubsetCode:
    """The code of one topology; its tables are built once."""
    return SubsetCode(num_experts, top_k)


class _GuessTable:
    """The largest c with C(c, i) ≤ x, or one less, from the leading bits of x + 1 as a float (i ≥ 2).

    C(c + 1, i) exceeds C(c, i) by a factor of at least 1 + i / E, so steps of 2^-m ≤ i / 2E between table
    entries hold at most one c. Entries stand for slightly smaller x: rounding to float can only make a guess
    low, never high.
    """

    def __init__(self, num_experts: int, i: int) -> None:
        self._mantissa_bits = m = max(0, (2 * num_experts // i).bit_length())
        entries = comb(num_experts, i).bit_length() + 1 << m  # rounding may reach the next power of two
        starts = [self._first_entry(comb(c, i)) for c in range(i, num_experts)]
        self._guesses = i - 1 + np.searchsorted(starts, np.arange(entries), side="right")

    def _first_entry(self, x: int) -> int:
        """The first entry that stands for `x` or more."""
        m = self._mantissa_bits
        exponent = (x + 1).bit_length() - 1
        entry = (exponent << m) + (x + 1 << m >> exponent) - (1 << m)
        while self._least_x(entry) < x:
            entry += 1
        return entry

    def _least_x(self, entry: int) -> int:
        m = self._mantissa_bits
        edge = ((1 << m) + (entry & (1 << m) - 1)) << (entry >> m)  # of x + 1, times 2^m
        return (edge - (edge >> 48) >> m) - 1

    def guess(self, x_N: NDArray[np.float64]) -> NDArray[np.intp]:
        bits_N = (x_N + 1.0).view(np.int64)
        bits_N >>= 52 - self._mantissa_bits
        bits_N -= 1023 << self._mantissa_bits
        return self._guesses.take(bits_N)


def _at_least(
    rank_FN: NDArray[np.int64], table_FE: NDArray[np.int64], index_N: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """bool [N]: rank ≥ table[index], for numbers split into fields."""
    at_least_N = rank_FN[0] >= table_FE[0].take(index_N)
    for rank_N, table_E in zip(rank_FN[1:], table_FE[1:], strict=True):
        entry_N = table_E.take(index_N)
        at_least_N = (rank_N > entry_N) | ((rank_N == entry_N) & at_least_N)
    return at_least_N


def sort_columns(experts_KN: Integers) -> Integers:
    """The ids of every column in ascending order, by a network: sorts whole rows at a time."""
    rows = list(experts_KN)
    for low, high in _merge_exchange(len(rows)):
        rows[low], rows[high] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
    return np.stack(rows)


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Comparators of Batcher's merge exchange (Knuth, TAOCP 3, 5.2.2, algorithm M)."""
    top = 1 << max(n - 1, 0).bit_length() >> 1
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
