"""Reading ahead from memory maps, and through sources that are built from others."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_hint_checks import (
    Range,
    check_given_back,
    check_kept,
    check_read_ahead,
    drop_pages,
    wait_for,
)
from penstock_native import needs_c
from penstock_page_cache import cached_pages
from penstock_special_files import SPECIAL, plant
from penstock_test_parts import run_at_once

from penstock import ReadError
from penstock.source import ArraySource, Concat, DatasetSource, Numbered, Take, Zip

pytestmark = needs_c  # which pages of a map are in memory is known to the C part alone

_ROWS, _WIDTH = 320, 16_384
_ROW_BYTES = 4 * _WIDTH  # 20 MB in all
_OFFSET = 8192
_ITEMS = np.array([1, 0, 319, 1])
_TRUTH = np.arange(_ROWS * _WIDTH, dtype=np.int32).reshape(_ROWS, _WIDTH)


def write_rows(path: Path, offset: int = 0) -> Path:
    """Write a header and rows, all in whole pages; every value is its place."""
    path.write_bytes(bytes(_OFFSET) + (_TRUTH + offset).tobytes())
    return path


def map_rows(path: Path) -> Any:
    return np.memmap(path, np.int32, "r", _OFFSET, (_ROWS, _WIDTH))


def ranges_of(path: Path, rows: Any) -> list[Range]:
    return [(path, _OFFSET + row * _ROW_BYTES, _OFFSET + (row + 1) * _ROW_BYTES) for row in rows]


def make_source(path: Path) -> ArraySource:
    """Return an open source that has no pages mapped: those that it was identified by would not be dropped."""
    source = ArraySource({"x": map_rows(path)})
    source.release(np.arange(_ROWS))
    return source


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "x.bin")


def test_rows_of_a_memory_map_are_read_ahead_and_given_back(path: Path) -> None:
    source = make_source(path)
    rows = ranges_of(path, [0, 1, 319])
    check_read_ahead(path.parent, lambda: source.prepare(_ITEMS), rows)
    found = source.take(_ITEMS)["x"]  # maps their pages
    assert (found == _TRUTH[_ITEMS]).all()
    assert wait_for(lambda: source.prepare(_ITEMS) == 0)
    check_given_back(lambda: source.release(_ITEMS), rows)
    assert (source.take(_ITEMS)["x"] == found).all()
    assert source.stored_bytes == _ROWS * _ROW_BYTES


def test_what_is_not_released_stays(path: Path) -> None:
    source = make_source(path)
    kept, given_back = np.split(np.arange(40), [30])
    check_kept(lambda: source.take(kept), lambda: source.release(given_back), ranges_of(path, kept))


@pytest.mark.parametrize("state", ["open", "closed", "pickled"])
def test_a_source_that_is_not_open_reads_ahead_too(path: Path, state: str) -> None:
    source = make_source(path)
    if state == "closed":
        source.close()
    if state == "pickled":
        source = pickle.loads(pickle.dumps(source))
    check_read_ahead(path.parent, lambda: source.prepare(_ITEMS), ranges_of(path, _ITEMS))
    check_given_back(lambda: source.release(_ITEMS), ranges_of(path, _ITEMS))


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        (lambda array: array[::-1], [319, 318, 0]),
        (lambda array: array[10:], [11, 10]),
        (lambda array: array[::2, ::2], [2, 0]),
        (lambda array: array.reshape(_ROWS, 128, -1).transpose(0, 2, 1), [1, 0, 319]),
    ],
    ids=["reversed", "offset", "every other", "transposed rows"],
)
def test_rows_of_views_are_where_their_bytes_are(path: Path, view: Callable[[Any], Any], rows: list[int]) -> None:
    array = view(map_rows(path))
    source = ArraySource({"x": array})
    source.close()
    wanted = np.array(view(_TRUTH))
    del array
    items = np.array([item for item in _ITEMS if item < len(wanted)])
    check_read_ahead(path.parent, lambda: source.prepare(items), ranges_of(path, rows))
    # The last page of a row may hold values that are not in the view.
    whole = [(where, begin, end - 4096) for where, begin, end in ranges_of(path, rows)]
    check_given_back(lambda: source.release(items), whole)
    assert (source.take(items)["x"] == wanted[items]).all()


def test_values_that_lie_far_apart_are_not_read_ahead(path: Path) -> None:
    source = ArraySource({"x": map_rows(path).T})
    source.close()
    drop_pages(path.parent)
    assert source.prepare(np.arange(5)) == 0
    assert not cached_pages(path).any()


def test_rows_that_overlap_are_not_given_back(path: Path) -> None:
    windows = np.ndarray((_ROWS - 3, 4 * _WIDTH), np.int32, map_rows(path), strides=(_ROW_BYTES, 4))
    source = ArraySource({"x": windows})
    check_kept(lambda: source.take(np.array([0])), lambda: source.release(np.array([0])), ranges_of(path, range(4)))
    assert source.stored_bytes == path.stat().st_size


def test_arrays_in_memory_have_nothing_to_read() -> None:
    source = ArraySource({"x": np.arange(10)})
    assert source.prepare(np.arange(10)) == source.stored_bytes == 0
    source.release(np.arange(10))


def test_items_that_do_not_exist_are_ignored(path: Path) -> None:
    source = make_source(path)
    for made in (source, Concat([source]), Take(source, [3]), Zip([source]), Numbered(source), DatasetSource([1])):
        made.prepare(np.array([-1, 10**9]))
        made.release(np.array([-1, 10**9]))
        made.prepare(np.zeros(0, np.int64))


# -- faults ------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, 1 << 20)


def replace(path: Path) -> None:
    write_rows(path.with_suffix(".other.bin"), offset=7).replace(path)


@pytest.mark.parametrize("fault", [truncate, Path.unlink, replace])
def test_a_file_that_changes_raises_what_it_did_before_when_it_is_read(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    outcomes = []
    for number, is_prepared in enumerate((False, True)):
        path = write_rows(tmp_path / f"{number}.bin")
        source = make_source(path)
        fault(path)
        if is_prepared:
            assert source.prepare(_ITEMS) >= 0
            source.release(_ITEMS)
        try:
            outcomes.append(source.take(_ITEMS)["x"].tolist())
        except ReadError as error:
            outcomes.append(str(error).replace(str(path), "PATH"))
    assert outcomes[0] == outcomes[1]


def test_another_file_of_the_same_name_is_left_alone(path: Path) -> None:
    source = make_source(path)
    replace(path)
    drop_pages(path.parent)
    assert source.prepare(_ITEMS) == 0
    assert not cached_pages(path).any()


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_file_is_not_opened(path: Path, kind: str) -> None:
    source = make_source(path)
    wanted = source.take(_ITEMS)["x"]
    with plant(kind, path):
        assert source.prepare(_ITEMS) == 0
        source.release(_ITEMS)
        assert (source.take(_ITEMS)["x"] == wanted).all()
        path.touch()


def test_threads_may_prepare_read_release_and_close_at_once(path: Path) -> None:
    source = make_source(path)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(20):
            items = rng.integers(0, _ROWS, 8)
            source.prepare(items)
            assert (source.take(items)["x"] == _TRUTH[items]).all()
            source.release(items)
            if number == 0:
                source.close()

    run_at_once(4, work)


# -- sources of sources ------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[list[Path], list[ArraySource]]:
    paths = [write_rows(tmp_path / f"{name}.bin") for name in "ab"]
    return paths, [make_source(path) for path in paths]


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (Concat, ([0, 319], [0])),
        (lambda sources: Take(Concat(sources), [320, 7, 0, *range(400)]), ([7, 0, 316], [0])),
        (lambda sources: Numbered(Concat(sources)), ([0, 319], [0])),
    ],
    ids=["Concat", "Take", "Numbered"],
)
def test_combined_sources_pass_items_on(
    pair: tuple[list[Path], list[ArraySource]], make: Callable[[list[ArraySource]], Any], rows: tuple[list[int], ...]
) -> None:
    paths, sources = pair
    source = make(sources)
    items = np.array([0, 1, 2, 319]) if isinstance(source, Take) else np.array([320, 0, 319])
    expected = [place for path, its_rows in zip(paths, rows, strict=True) for place in ranges_of(path, its_rows)]
    check_read_ahead(paths[0].parent, lambda: source.prepare(items), expected)
    found = source.take(items)
    check_given_back(lambda: source.release(items), expected)
    assert all((source.take(items)[name] == values).all() for name, values in found.items())


def test_zipped_sources_all_read_ahead(pair: tuple[list[Path], list[ArraySource]]) -> None:
    paths, sources = pair
    source = Zip([sources[0], ArraySource({"y": map_rows(paths[1]), "z": np.arange(_ROWS)})])
    source.release(np.arange(_ROWS))
    wanted = [place for path in paths for place in ranges_of(path, [0, 319])]
    check_read_ahead(paths[0].parent, lambda: source.prepare(np.array([0, 319])), wanted)
    check_given_back(lambda: source.release(np.array([0, 319])), wanted)


def test_stored_bytes_add_up(pair: tuple[list[Path], list[ArraySource]]) -> None:
    _, (first, second) = pair
    n_bytes = _ROWS * _ROW_BYTES
    assert Concat([first, second]).stored_bytes == 2 * n_bytes
    assert Numbered(Zip([first, ArraySource({"y": np.arange(_ROWS)})])).stored_bytes == n_bytes
    assert Take(first, [0, 0, 1, 2]).stored_bytes == 3 * _ROW_BYTES
    unknown = DatasetSource(list(range(_ROWS)))
    assert unknown.stored_bytes is Concat([unknown]).stored_bytes is None


class Listening:
    """A dataset that records what is announced; with `stored_bytes`."""

    stored_bytes = 123

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.released: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, item: int) -> int:
        return item

    def prepare(self, items: Any) -> int:
        self.prepared += items.tolist()
        return 7

    def release(self, items: Any) -> None:
        self.released += items.tolist()


class Preparing(Listening):
    """A dataset whose methods of these names do something else."""

    stored_bytes = "unknown"

    def prepare(self, folder: str = "/") -> int:
        raise AssertionError(folder)

    def release(self) -> None:
        raise AssertionError


def test_a_dataset_is_told_if_it_can_be() -> None:
    dataset = Listening()
    source = DatasetSource(dataset)
    assert source.prepare(np.array([3, 1, 9])) == 7
    source.release(np.array([3]))
    assert (dataset.prepared, dataset.released, source.stored_bytes) == ([3, 1], [3], 123)
    for other in (Preparing(), [1, 2, 3]):
        source = DatasetSource(other)
        assert source.prepare(np.array([0])) == 0
        source.release(np.array([0]))
        assert source.stored_bytes is None
