"""Bits and sets: exact for every width, and within the bound for real models."""

import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.routing.packing import pack_bits, packed_bytes, unpack_bits
from moe_rl.routing.subsets import SubsetCode, sort_columns, subset_code

# E, K, ⌈log2 C(E, K)⌉ worked with exact integers
TOPOLOGIES = [
    (8, 2, 5),  # Mixtral
    (16, 1, 4),  # Llama 4
    (128, 4, 24),  # gpt-oss-120b
    (128, 8, 41),  # Qwen3-30B-A3B, Qwen3-235B-A22B
    (256, 8, 49),  # DeepSeek-V3
    (384, 8, 54),  # Kimi-K2
    (512, 10, 69),  # Qwen3-Next
    (768, 12, 87),  # LongCat-Flash, zero experts included
    (512, 22, 128),  # Nemotron 3 Super
]


def test_bits_by_hand():
    # 5 + 9·8 + 3·64 = 0b011_001_101, the lowest value in the lowest bits
    assert pack_bits(np.array([5, 1, 3]), 3).tolist() == [0b11_001_101, 0b0]
    assert pack_bits(np.array([5, 1, 7]), 3).tolist() == [0b11_001_101, 0b1]
    assert pack_bits(np.array([0x123, 0xABC]), 12).tolist() == [0x23, 0xC1, 0xAB]
    assert pack_bits(np.array([], np.int64), 12).tolist() == []


@given(st.integers(1, 63), st.integers(0, 200), st.randoms(use_true_random=False))
def test_every_width_and_length_is_the_integer_of_its_bits(width, count, random):
    values = [random.getrandbits(width) for _ in range(count)]
    values[:2] = [0, 2**width - 1][:count]
    data = pack_bits(np.array(values, np.int64), width)
    assert len(data) == packed_bytes(count, width) == -(-count * width // 8)
    assert int.from_bytes(data.tobytes(), "little") == sum(v << i * width for i, v in enumerate(values))
    assert unpack_bits(data, width, count).tolist() == values


def test_no_bits_hold_zeros():
    assert len(pack_bits(np.zeros(5, np.int64), 0)) == 0
    assert unpack_bits(np.zeros(0, np.uint8), 0, 5).tolist() == [0] * 5


@pytest.mark.parametrize("n", range(1, 13))
def test_the_network_sorts(n):
    # the 0-1 principle: a network that sorts every column of zeros and ones sorts all (Knuth 5.3.4, Z)
    columns = np.array(list(itertools.product([0, 1], repeat=n)), np.uint8).T
    assert np.array_equal(sort_columns(columns), np.sort(columns, axis=0))


def test_ranks_by_hand():
    # of C(5, 3) = 10 sets {0, 1, 2} is first, {2, 3, 4} last; {1, 3, 4}: C(1, 1) + C(3, 2) + C(4, 3) = 8
    code = SubsetCode(5, 3)
    sets = np.array([[0, 1, 2], [4, 1, 3], [2, 3, 4]]).T
    assert code.rank(sets).tolist() == [[0, 8, 9]]


@pytest.mark.parametrize(("E", "K"), [(8, 2), (16, 1), (7, 3), (12, 6), (16, 8), (5, 4), (6, 6), (1, 1)])
def test_ranks_number_all_sets(E, K):
    code = SubsetCode(E, K)
    in_order = sorted(itertools.combinations(range(E), K), key=lambda subset: subset[::-1])
    sets = np.array(in_order, np.uint8).T
    ranks = code.rank(sets)
    assert ranks.tolist() == [list(range(comb(E, K)))]
    back = np.empty_like(sets)
    code.unrank(ranks, back)
    assert np.array_equal(back, sets)
    assert code.is_rank(ranks) and not code.is_rank(ranks[:, -1:] + 1)


@pytest.mark.parametrize(("E", "K", "bits"), TOPOLOGIES)
def test_real_models_are_within_the_bound(E, K, bits):
    code = subset_code(E, K)
    assert code.bits == bits
    assert 2 ** (bits - 1) < comb(E, K) <= 2**bits
    assert bits <= code.fields * code.width <= 1.05 * bits


# Nearly all of many experts, of which C(c, k) exceeds C(E, K) for c and k that no set has.
NEARLY_ALL = [(68, 67, 7), (128, 127, 7), (96, 90, 30), (128, 100, 94)]


@pytest.mark.parametrize(("E", "K", "bits"), TOPOLOGIES + NEARLY_ALL)
def test_sets_at_every_boundary_of_the_search(E, K, bits):
    """Decoding guesses an expert and corrects it by one: the ranks where the guess could be wrong by more are
    those next to C(c, k), and the powers of two where floats round."""
    ranks = {comb(c, k) + step for c in range(E + 1) for k in range(1, K + 1) for step in (-2, -1, 0, 1, 2)}
    ranks |= {2**bit + step for bit in range(bits) for step in (-2, -1, 0, 1)}
    ranks |= {comb(E, K) - 1 - step for step in range(100)}
    ranks = sorted(rank for rank in ranks if 0 <= rank < comb(E, K))
    code = subset_code(E, K)
    mask = 2**code.width - 1
    rank_FN = np.array([[r >> f * code.width & mask for r in ranks] for f in range(code.fields)], np.int64)
    sets = np.empty((K, len(ranks)), np.int64)
    code.unrank(rank_FN, sets)
    assert (np.diff(sets, axis=0) > 0).all() and sets.min() >= 0 and sets.max() < E
    exact = [sum(comb(int(c), i) for i, c in enumerate(column, start=1)) for column in sets.T]
    assert exact == ranks
    assert np.array_equal(code.rank(sets), rank_FN)
    assert code.is_rank(rank_FN)


@settings(max_examples=60, deadline=None)  # tables of a new topology take up to 0.1 s
@given(st.data())
def test_any_sets_of_any_model_come_back(data):
    E = data.draw(st.integers(1, 600), label="E")
    K = data.draw(st.integers(1, min(E, 24)), label="K")
    K = data.draw(st.sampled_from([K, E - K + 1]), label="K or nearly all")
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    sets = np.random.default_rng(seed).random((50, E)).argsort(1)[:, :K].T
    code = subset_code(E, K)
    ranks = code.rank(sets)
    assert (ranks >= 0).all() and (ranks >> code.width == 0).all() and code.is_rank(ranks)
    back = np.empty_like(sets)
    code.unrank(ranks, back)
    assert np.array_equal(back, np.sort(sets, axis=0))


@pytest.mark.parametrize(("E", "K"), [(128, 8), (512, 10), (512, 22)])
def test_a_number_of_no_set_is_told(E, K):
    code = subset_code(E, K)
    for number, expected in [(comb(E, K) - 1, True), (comb(E, K), False), (2**code.bits - 1, False)]:
        fields = [[number >> f * code.width & 2**code.width - 1] for f in range(code.fields)]
        assert code.is_rank(np.array(fields, np.int64)) == expected
