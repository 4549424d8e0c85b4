"""A keyed bijection on 0 … n-1, as uniform as a stored shuffle."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.index import Index
from penstock.core.seeds import key_for, subkeys
from penstock.plan.orders import Shuffle
from penstock.plan.permute import permute, unpermute
from penstock.plan.plan import Plan

keys = st.integers(0, 2**64 - 1)


def permutations(n: int, count: int, positions: list[int]) -> np.ndarray:
    """Return the items of the first `count` windows at these positions, shape (count, len(positions))."""
    of_windows = subkeys(key_for(0, "window", 0), np.arange(count))
    asked = np.tile(np.array(positions), count)
    return permute(asked, n, np.repeat(of_windows, len(positions))).reshape(count, len(positions))


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit(freedom: int) -> float:
    """Return the chi-square value exceeded once in about 30 000 tries, by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


@given(st.integers(1, 5000), keys)
def test_every_position_has_an_item_of_its_own(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 65_535, 65_537])
def test_sizes_around_powers_of_two_are_permuted(n: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_no_positions_give_no_items() -> None:
    for function in (permute, unpermute):
        assert function(np.zeros(0, np.int64), 10, 1).tolist() == []
        assert function(np.zeros(0, np.int64), 0, 1).tolist() == []


@given(st.integers(1, 10**15) | st.integers(1, 600), keys, st.data())
def test_unpermute_finds_the_position_of_every_item(n: int, key: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    assert unpermute(permute(positions, n, key), n, key).tolist() == positions.tolist()
    assert permute(unpermute(positions, n, key), n, key).tolist() == positions.tolist()


@given(st.lists(st.tuples(st.integers(1, 2000) | st.integers(250, 260), keys), min_size=1, max_size=6))
def test_unpermute_takes_sizes_and_keys_for_each_item(groups: list[tuple[int, int]]) -> None:
    positions = np.concatenate([np.arange(n) for n, _ in groups])
    sizes = np.concatenate([np.full(n, n) for n, _ in groups])
    of_each = np.concatenate([np.full(n, key, np.uint64) for n, key in groups])
    assert np.array_equal(unpermute(permute(positions, sizes, of_each), sizes, of_each), positions)


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 5000, 65_536, 70_001])
def test_many_positions_at_once_give_what_each_gives_alone(n: int) -> None:
    # Many positions for the size are permuted by tables, a few are not.
    positions = np.tile(np.arange(n), -(-20_000 // n))
    few = np.arange(0, n, max(1, n // 50))
    whole = permute(positions, n, 7)
    assert whole[few].tolist() == [permute(np.array([position]), n, 7).item() for position in few]
    assert np.array_equal(whole, np.tile(whole[:n], -(-20_000 // n)))
    assert np.array_equal(unpermute(whole, n, 7), positions)


@given(st.lists(st.tuples(st.integers(1, 2000) | st.integers(250, 260), keys), min_size=1, max_size=6))
def test_sizes_and_keys_given_for_each_position_permute_each_group_on_its_own(groups: list[tuple[int, int]]) -> None:
    positions = np.concatenate([np.arange(n) for n, _ in groups])
    sizes = np.concatenate([np.full(n, n) for n, _ in groups])
    of_each = np.concatenate([np.full(n, key, np.uint64) for n, key in groups])
    wanted = np.concatenate([permute(np.arange(n), n, key) for n, key in groups])
    assert np.array_equal(permute(positions, sizes, of_each), wanted)
    # Mixed up, so that groups do not stand in runs.
    mixed = permute(np.arange(len(positions)), len(positions), 1)
    assert np.array_equal(permute(positions[mixed], sizes[mixed], of_each[mixed]), wanted[mixed])


@given(st.integers(1, 3000), keys)
def test_one_size_or_key_for_all_equals_the_same_one_for_each(n: int, key: int) -> None:
    positions = np.arange(n)
    wanted = permute(positions, n, key).tolist()
    sizes, of_each = np.full(n, n), np.full(n, key, np.uint64)
    assert permute(positions, sizes, key).tolist() == wanted
    assert permute(positions, n, of_each).tolist() == wanted
    assert permute(positions, sizes, of_each).tolist() == wanted


@given(st.lists(st.integers(1, 600), min_size=2, max_size=5), keys)
def test_one_key_serves_small_and_large_sizes_together(sizes: list[int], key: int) -> None:
    positions = np.concatenate([np.arange(n) for n in sizes])
    of_each = np.concatenate([np.full(n, n) for n in sizes])
    wanted = np.concatenate([permute(np.arange(n), n, key) for n in sizes])
    assert np.array_equal(permute(positions, of_each, key), wanted)


@given(st.integers(1, 10**15), keys, st.data())
def test_an_item_does_not_depend_on_what_is_asked_with_it(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permute(np.array(positions), n, key).tolist()
    assert together == [permute(np.array([position]), n, key).item() for position in positions]
    assert all(0 <= item < n for item in together)


def test_the_positions_are_left_as_they_were() -> None:
    positions = np.arange(100)
    permute(positions, 300, 1)
    assert positions.tolist() == list(range(100))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_permutation_of_a_few_items_is_equally_frequent(n: int) -> None:
    # As many as it takes to see the bias that 12 rounds in place of 24 leave in permutations of five.
    each = 2000
    # Each permutation as one number in base n.
    codes = permutations(n, each * math.factorial(n), list(range(n))) @ n ** np.arange(n)
    kinds, found = np.unique(codes, return_counts=True)
    assert len(kinds) == math.factorial(n)
    assert chi_square(found, each) < limit(math.factorial(n) - 1)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 16, 17, 31, 100, 257])
def test_every_item_comes_equally_often_at_every_position(n: int) -> None:
    count = 20 * n
    made = permutations(n, count, list(range(n)))
    cells = np.bincount((made + n * np.arange(n)).ravel(), minlength=n * n)
    # Rows and columns have known sums, so (n - 1)**2 counts are free; those of permutations spread n / (n - 1) wider.
    assert chi_square(cells, count / n) * (n - 1) / n < limit((n - 1) ** 2)


@pytest.mark.parametrize("n", [5, 6, 7, 8, 9, 13, 16, 17, 40])
def test_neighbours_are_any_two_items_equally_often(n: int) -> None:
    count = 20 * n * (n - 1)
    made = permutations(n, count, [0, 1])
    pairs = np.bincount(made[:, 0] * n + made[:, 1], minlength=n * n).reshape(n, n)
    assert not np.diagonal(pairs).any()
    off_diagonal = pairs[~np.eye(n, dtype=bool)]
    assert chi_square(off_diagonal, 20) < limit(n * (n - 1) - 1)


@pytest.mark.parametrize("n", [260, 512, 1000])
@pytest.mark.parametrize("apart", [1, 2, 128])
def test_positions_of_a_large_permutation_are_uncorrelated(n: int, apart: int) -> None:
    tenths = permutations(n, 3000, [0, apart]) * 10 // n
    cells = np.bincount(tenths[:, 0] * 10 + tenths[:, 1], minlength=100)
    assert chi_square(cells, 30) < limit(99)


@pytest.mark.parametrize("n", [50, 1000, 4096])
def test_orders_of_neighbouring_epochs_and_seeds_have_nothing_in_common(n: int) -> None:
    orders = [permute(np.arange(n), n, key_for(s, "shuffle", e)) for s in range(6) for e in range(6)]
    # Two independent permutations agree in one place on average.
    agreements = [int((a == b).sum()) for k, a in enumerate(orders) for b in orders[:k]]
    assert max(agreements) <= 8
    assert 0.8 < np.mean(agreements) < 1.2


@pytest.mark.parametrize("batch", [0, 10**9 // 256 // 2, 10**9 // 256 - 1])
def test_a_draw_out_of_a_billion_items_takes_little_memory_anywhere(batch: int) -> None:
    tracemalloc.start()
    try:
        draw = Plan(Index.uniform(10**9), Shuffle(), batch_size=256, seed=1).epoch(3).draw(batch)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000_000
    assert len(set(draw.items.tolist())) == 256
    assert draw.items.min() >= 0
    assert draw.items.max() < 10**9
    # Spread over all of the data, not over a part of it.
    assert np.ptp(draw.items) > 0.9 * 10**9
