"""Where windows lie: anywhere or side by side; and that delivered arrays share memory with nothing else."""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import Mishap, mishap_in_the_users_code

from penstock import Field, OptionError, PlanError, ReadError
from penstock.core.index import Index
from penstock.recipes.streams import RandomChunkLoader
from penstock.recipes.streams.windows import (
    Coded,
    GivenWindows,
    PartitionWindows,
    RandomWindows,
    WindowData,
    WindowMemory,
)

Window = tuple[int, int]


def windows(order: Any, seed: int = 0, epoch: int = 0) -> list[Window]:
    """Return the windows of an epoch, in order."""
    index = Index.uniform(order.coded.n_items)
    order.check(index)
    arrangement = order.arrange(index, seed, epoch)
    return [order.coded.window(item) for item in arrangement.items(np.arange(arrangement.length)).tolist()]


# -- side by side ------------------------------------------------------------------------------------------------------


@st.composite
def partitions(draw: st.DrawFn) -> PartitionWindows:
    total, size = draw(st.integers(1, 300)), draw(st.integers(1, 80))
    align = draw(st.integers(1, size if size <= total else 100))
    return PartitionWindows(Coded(total, size), align)


@given(order=partitions(), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_partition_holds_every_row_exactly_once_in_aligned_windows(
    order: PartitionWindows, seed: int, epoch: int
) -> None:
    found = windows(order, seed, epoch)
    borders = [0, *(stop for _, stop in sorted(found))]
    assert sorted(found) == list(pairwise(borders))
    assert borders[-1] == order.coded.total
    assert all(0 < stop - start <= order.coded.size for start, stop in found)
    assert all(start % order.align == 0 for start, _ in found)


@given(order=partitions(), seed=st.integers(0, 2**40), epochs=st.lists(st.integers(0, 10_000), min_size=2, max_size=5))
def test_a_partition_has_equally_many_windows_in_each_epoch(
    order: PartitionWindows, seed: int, epochs: list[int]
) -> None:
    assert {len(windows(order, seed, epoch)) for epoch in epochs} == {order.count}


@pytest.mark.parametrize(
    ("total", "size", "align", "shifts"),
    [
        (20, 5, 1, {1, 2, 3, 4}),
        (22, 5, 1, {2, 3, 4}),
        (24, 8, 2, {2, 4, 6}),
        (967_680, 65_536, 2000, set(range(8000, 64_000, 2000))),
        (12, 12, 4, {4, 8}),
        (20, 6, 3, {3}),
        (21, 6, 3, {3}),
        (23, 6, 3, {6}),  # another border would make one window more than in other epochs, so there is none
        (20, 1, 1, {1}),
        (16, 4, 4, {4}),
    ],
)
def test_borders_are_shifted_to_wherever_they_may_lie(total: int, size: int, align: int, shifts: set[int]) -> None:
    order = PartitionWindows(Coded(total, size), align)
    epochs = range(400 if total > 100 else 60)
    assert {sorted(windows(order, seed=3, epoch=epoch))[0][1] for epoch in epochs} == shifts


def test_windows_of_a_partition_come_in_another_order_each_epoch() -> None:
    order = PartitionWindows(Coded(40, 4), align=4)  # no shift is possible
    first, second = windows(order, epoch=0), windows(order, epoch=1)
    assert sorted(first) == sorted(second)
    assert first != second != sorted(second)
    assert windows(order, seed=1) != first


def test_a_recording_that_is_smaller_than_a_window_is_one_window() -> None:
    order = PartitionWindows(Coded(7, 10), align=4)
    assert [windows(order, epoch=epoch) for epoch in range(3)] == [[(0, 7)]] * 3


def test_borders_that_cannot_be_aligned_are_refused_when_the_loader_is_made() -> None:
    with pytest.raises(PlanError, match=r"chunk_size must be >= the alignment of its borders \(12 rows\), got 10"):
        RandomChunkLoader(lambda a, b: None, 100, 10, "cpu", time_units=4, coverage="partition", align=6)


def test_align_means_nothing_for_random_windows_and_is_refused() -> None:
    with pytest.raises(OptionError, match="align must be 1 with coverage='random', got 4"):
        RandomChunkLoader(lambda a, b: None, 100, 10, "cpu", align=4)


# -- anywhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "size", "align"), [(23, 8, 4), (23, 8, 1), (24, 8, 4), (20, 1, 1), (9, 9, 3)])
def test_random_windows_begin_at_every_multiple_equally_often_both_ends_included(
    total: int, size: int, align: int
) -> None:
    found = windows(RandomWindows(Coded(total, size), 4000, align), seed=11)
    possible = range(0, total - size + 1, align)
    counts = Counter(start for start, _ in found)
    assert {stop - start for start, stop in found} == {size}
    assert sorted(counts) == list(possible)
    expected = 4000 / len(possible)
    # Chi squared, ten standard deviations above its mean: the draws are fixed, so this holds for ever or never.
    wrong = sum((counts[start] - expected) ** 2 / expected for start in possible)
    assert wrong < len(possible) + 10 * (2 * len(possible)) ** 0.5


def test_random_windows_depend_on_seed_and_epoch_but_their_count_does_not_change_them() -> None:
    coded = Coded(100_000, 10)
    first = windows(RandomWindows(coded, 8))
    assert windows(RandomWindows(coded, 5)) == first[:5]
    assert windows(RandomWindows(coded, 8)) == first
    others = [windows(RandomWindows(coded, 8), seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (0, 1), (1, 1))]
    assert len({tuple(some) for some in [first, *others]}) == 4


def test_a_window_that_is_larger_than_the_recording_is_all_of_it() -> None:
    assert windows(RandomWindows(Coded(7, 10), 3, align=4)) == [(0, 7)] * 3


# -- given -------------------------------------------------------------------------------------------------------------


def test_given_windows_come_as_they_are_given() -> None:
    given_windows = ((5, 9), (0, 1), (5, 9), (2, 12))
    assert windows(GivenWindows(Coded(12, 12), given_windows), epoch=4) == list(given_windows)


@pytest.mark.parametrize("bad", [(3, 3), (4, 2), (-1, 2), (5, 13)])
def test_windows_that_are_empty_inverted_or_outside_are_refused(bad: Window) -> None:
    with pytest.raises(PlanError, match=rf"Chunks must be .* got \({bad[0]}, {bad[1]}\)"):
        windows(GivenWindows(Coded(12, 12), ((0, 3), bad)))


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0), (-1, 4), (4, 2.0), (True, 4)])
def test_invalid_sizes_are_refused(total: Any, size: Any) -> None:
    with pytest.raises(OptionError, match=r"total_timesteps|chunk_size"):
        Coded(total, size)


# -- whose memory it is ------------------------------------------------------------------------------------------------

ROWS = 6
RECORDING = np.arange(24.0).reshape(ROWS, 4)


def data_of(load_fn: Any) -> tuple[WindowData, int]:
    coded = Coded(ROWS, ROWS)
    return WindowData(load_fn, coded, pinned=False), int(coded.items(np.array([0]), np.array([ROWS]))[0])


def kinds(folder: Path) -> dict[str, tuple[Any, np.ndarray]]:
    """Return functions that give an array which somebody else has, too, and that array."""
    np.save(folder / "x.npy", RECORDING)
    whole, buffer = RECORDING.copy(), RECORDING.copy()
    read_only = np.load(folder / "x.npy", mmap_mode="r")
    writable = np.load(folder / "x.npy", mmap_mode="r+")
    locked = RECORDING.copy()
    locked.flags.writeable = False
    cached = lru_cache(lambda a, b: RECORDING[a:b].copy())
    return {
        "views": (lambda a, b: (whole[a:b], whole[a:b]), whole),
        "the array itself": (lambda a, b: (whole, whole), whole),
        "one buffer again and again": (lambda a, b: buffer, buffer),
        "a cache": (cached, cached(0, ROWS)),
        "a read-only map": (lambda a, b: (read_only[a:b],), read_only),
        "a writable map": (lambda a, b: [writable[a:b]], writable),
        "read-only": (lambda a, b: locked, locked),
    }


KINDS = [
    "views",
    "the array itself",
    "one buffer again and again",
    "a cache",
    "a read-only map",
    "a writable map",
    "read-only",
]


@pytest.mark.parametrize("kind", KINDS)
def test_writing_over_a_chunk_does_not_reach_what_somebody_else_has(tmp_path: Path, kind: str) -> None:
    load_fn, theirs = kinds(tmp_path)[kind]
    data, item = data_of(load_fn)
    first, second = data[item]["tensors"], data[item]["tensors"]
    for tensor in first:
        assert np.array_equal(tensor.numpy(), RECORDING)
        tensor.fill_(-1)
        assert np.array_equal(theirs, RECORDING)
    assert all(np.array_equal(tensor.numpy(), RECORDING) for tensor in second)
    assert np.array_equal(np.load(tmp_path / "x.npy"), RECORDING)


def test_an_array_that_nobody_else_has_is_delivered_without_a_copy() -> None:
    places = []

    def load(start: int, stop: int) -> np.ndarray:
        array = RECORDING[start:stop].copy()
        places.append(array.ctypes.data)
        return array

    data, item = data_of(load)
    assert [data[item]["tensors"][0].data_ptr()] == places


@pytest.mark.parametrize(
    "strange", [np.asfortranarray(RECORDING), RECORDING.astype(">f8"), RECORDING.repeat(2, axis=1)[:, ::2]]
)
def test_arrays_in_any_layout_come_as_plain_tensors(strange: np.ndarray) -> None:
    data, item = data_of(lambda a, b: strange.copy(order="K"))
    (tensor,) = data[item]["tensors"]
    assert tensor.is_contiguous()
    assert np.array_equal(tensor.numpy(), RECORDING)


@pytest.mark.parametrize(
    ("given_value", "words"),
    [
        (np.zeros((5, 2)), r"load_fn\(0, 6\) must return arrays with 6 rows on axis 0, got shape \(5, 2\)"),
        ((np.zeros((6, 2)), np.zeros((7, 2))), r"shape \(7, 2\)"),
        (None, r"shape \(\)"),
        ((), "must return at least one array, got none"),
    ],
)
def test_arrays_of_the_wrong_length_are_refused_with_the_required_one(given_value: Any, words: str) -> None:
    data, item = data_of(lambda a, b: given_value)
    with pytest.raises(OptionError, match=words) as caught:
        data[item]
    assert any("chunk from 0 to 6" in note for note in caught.value.__notes__)


def test_given_windows_write_their_repr_once() -> None:
    # The repr is part of every saved state, and a loader takes a state for each chunk.
    order = GivenWindows(Coded(12, 12), ((0, 3), (5, 9)))
    assert repr(order) == "GivenWindows(coded=Coded(total=12, size=12), windows=((0, 3), (5, 9)))"
    first, second = repr(order), repr(order)
    assert first is second


def test_what_is_no_function_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(OptionError, match="load_fn must be a function of start and end, got array"):
        RandomChunkLoader(np.zeros(3), 3, 1, "cpu")


def test_an_error_of_the_function_is_the_very_object_and_says_which_chunk() -> None:
    data, item = data_of(lambda a, b: mishap_in_the_users_code("load", a))
    with pytest.raises(Mishap) as caught:
        data[item]
    assert any("chunk from 0 to 6" in note for note in caught.value.__notes__)


def test_an_index_error_of_the_function_is_not_taken_for_a_chunk_that_does_not_exist() -> None:
    data, item = data_of(lambda a, b: [][a])
    with pytest.raises(ReadError, match=r"load_fn\(0, 6\) raised an IndexError: list index out of range") as caught:
        data[item]
    assert isinstance(caught.value.__cause__, IndexError)


class Allocated:
    """Memory, and what was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, n_bytes: int) -> np.ndarray:
        self.rows.append(n_bytes // 64)
        return np.zeros(n_bytes, np.uint8)


def memory() -> tuple[WindowMemory, Allocated]:
    allocated = Allocated()
    return WindowMemory({"x": Field(np.dtype("f8"), (8,))}, allocated), allocated


def test_memory_of_shorter_windows_is_that_of_the_longest() -> None:
    room, allocated = memory()
    for n_rows in (100, 60, 7, 100, 8, 9, 51, 100):
        array = room.lend(n_rows)["x"]
        assert (array.shape, array.flags.c_contiguous) == ((n_rows, 8), True)
        array[:] = n_rows
        del array
    assert allocated.rows == [100]


def test_windows_that_become_longer_or_stay_shorter_get_memory_of_their_size() -> None:
    room, allocated = memory()
    held = room.lend(10)["x"]
    held[:] = 3
    for n_rows in (1000, 20, 20, 20, 20):
        room.lend(n_rows)
    assert allocated.rows == [10, 1000, 20]
    assert (held == 3).all()


def test_two_windows_at_once_have_memory_each() -> None:
    room, allocated = memory()
    blocks = [room.lend(n_rows)["x"] for n_rows in (10, 4, 6)]
    for number, block in enumerate(blocks):
        block[:] = number
    assert [block.max() for block in blocks] == [0, 1, 2]
    assert allocated.rows == [10, 10, 10]
