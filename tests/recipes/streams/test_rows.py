"""The rows of a stream: a function's are checked and copied, a source's are read as they are."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import Mishap, mishap_in_the_users_code

from penstock import ArraySource, OptionError, PlanError
from penstock.core.types import Span
from penstock.recipes.streams import PipelineChunkLoader, RandomChunkLoader
from penstock.recipes.streams.rows import FunctionRows, SourceFunction
from penstock.run import buffers

Window = tuple[int, int]
ROWS = 6
RECORDING = np.arange(24.0).reshape(ROWS, 4)
ALL = Span(0, ROWS)


def function_rows(load_fn: Any) -> FunctionRows:
    return FunctionRows(load_fn, ROWS, pinned=False)


@pytest.mark.parametrize("kind", [RandomChunkLoader, PipelineChunkLoader])
def test_none_in_the_place_of_an_array_stays_none(kind: Any) -> None:
    def load(start: int, end: int) -> tuple[Any, ...]:
        return RECORDING[start:end], None, RECORDING[start:end] + 1

    more = {"total_timesteps": ROWS, "chunk_size": 2, "seed": 3} if kind is RandomChunkLoader else {}
    with kind(load, device="cpu", **more) as loader:
        loader.start_epoch(2 if more else [(0, 2), (3, 6)])
        for _ in range(2):
            found = loader.get_next_chunk()
            data, stim, other = found if more else found[1]
            start = (found if more else found[1]).start
            assert stim is None
            assert data.tolist() == RECORDING[start : start + len(data)].tolist()
            assert other.tolist() == (RECORDING[start : start + len(data)] + 1).tolist()
        assert loader.memory_estimate().host_bytes > 0


# -- what a stream takes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [0, -1, 4.0, True])
def test_invalid_numbers_of_rows_are_refused(total: Any) -> None:
    with pytest.raises(OptionError, match="total_timesteps must be an integer >= 1"):
        RandomChunkLoader(lambda a, b: None, total, 2, "cpu")


@pytest.mark.parametrize("size", [0, 2.0, None])
def test_invalid_sizes_are_refused(size: Any) -> None:
    with pytest.raises(OptionError, match="chunk_size must be an integer >= 1"):
        RandomChunkLoader(lambda a, b: None, 4, size, "cpu")


def test_borders_that_cannot_be_aligned_are_refused_when_the_loader_is_made() -> None:
    with pytest.raises(PlanError, match=r"chunk_size must be >= the alignment of its borders \(12 rows\), got 10"):
        RandomChunkLoader(lambda a, b: None, 100, 10, "cpu", time_units=4, coverage="partition", align=6)


def test_align_means_nothing_for_random_windows_and_is_refused() -> None:
    with pytest.raises(OptionError, match="align must be 1 with coverage='random', got 4"):
        RandomChunkLoader(lambda a, b: None, 100, 10, "cpu", align=4)


def test_what_is_no_function_and_no_source_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(OptionError, match="load_fn must be a function of start and end, or a source, got array"):
        RandomChunkLoader(np.zeros(3), 3, 1, "cpu")  # type: ignore[arg-type]


def test_a_function_must_come_with_its_number_of_rows() -> None:
    with pytest.raises(
        OptionError, match=r"total_timesteps must be an integer >= 1, got None\. A function has no length"
    ):
        RandomChunkLoader(lambda a, b: None, chunk_size=5, device="cpu")


def test_a_stream_must_not_be_longer_than_its_source() -> None:
    source = ArraySource({"x": RECORDING})
    with pytest.raises(OptionError, match=r"total_timesteps must be <= 6, the rows of ArraySource.*, got 7"):
        RandomChunkLoader(source, 7, 2, "cpu")
    with PipelineChunkLoader(source, "cpu") as loader, pytest.raises(PlanError, match=r"end <= 6, got \(3, 7\)"):
        loader.start_epoch([(0, 2), (3, 7)])


# -- a source ----------------------------------------------------------------------------------------------------------


class Watched(ArraySource):
    """Notes the spans that are read, and where to."""

    def __init__(self, n_rows: int) -> None:
        super().__init__({"data": np.arange(3 * n_rows).reshape(n_rows, 3), "stim": -np.arange(n_rows)})
        self.spans: list[Window] = []
        self.places: set[int] = set()

    def read(self, span: Span, out: Any = None) -> Any:
        self.spans.append((span.start, span.stop))
        assert out is not None, "windows are read into memory that is lent"
        self.places.add(out["data"].ctypes.data)
        return super().read(span, out)

    def take(self, items: Any, out: Any = None) -> Any:
        raise AssertionError("windows are read, not taken item by item")


def deliver(loader: Any, start: Any) -> list[Window]:
    """Return the windows of an epoch, each of which is intact, and is dropped before the next."""
    loader.start_epoch(start)
    found = []
    while (given := loader.get_next_chunk())[0] is not None:
        chunk = given[1] if isinstance(given[0], int) else given
        rows = torch.arange(chunk.start, chunk.stop)
        assert torch.equal(chunk[0], (3 * rows)[:, None] + torch.arange(3))
        assert torch.equal(chunk[1], -rows)
        found.append((chunk.start, chunk.stop))
        del given, chunk
    return found


@pytest.mark.parametrize("options", [{}, {"coverage": "partition"}], ids=["random", "partition"])
@pytest.mark.parametrize("size", [70, 400, 5000])
def test_every_window_of_a_source_is_one_read_into_memory_that_is_used_again(
    size: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_LENT_BYTES", 0)  # lend small arrays, too
    source = Watched(1000)
    with RandomChunkLoader(source, chunk_size=size, device="cpu", prefetch=1, seed=2, **options) as loader:
        for _ in range(3):
            found = deliver(loader, None if options else 9)
            assert source.spans == found
            source.spans.clear()
    assert loader.state_dict()["total_timesteps"] == 1000
    if size < 1000:  # one is delivered, one is ready, one is being read; those of a partition have several lengths
        assert len(source.places) <= (9 if options else 3)


def test_a_source_gives_the_same_windows_as_a_function_of_the_same_rows() -> None:
    source = Watched(1000)
    wanted = []
    for load_fn in (source, SourceFunction(source), lambda a, b: tuple(ArraySource.read(source, Span(a, b)).values())):
        with RandomChunkLoader(load_fn, 900, 70, "cpu", seed=2) as loader:
            wanted.append([deliver(loader, 5), loader.state_dict(), deliver(loader, 4)])
    assert wanted[0] == wanted[1] == wanted[2]
    assert max(stop for windows in wanted[0][::2] for _, stop in windows) <= 900


def test_a_pipeline_reads_a_source() -> None:
    source, chunks = Watched(1000), [(5, 9), (0, 300), (5, 9)]
    with PipelineChunkLoader(source, "cpu") as loader:
        assert deliver(loader, chunks) == source.spans == chunks
        assert deliver(loader, [(7, 100)]) == [(7, 100)]


# -- whose memory it is ------------------------------------------------------------------------------------------------


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
    rows = function_rows(load_fn)
    first, second = rows.read(ALL), rows.read(ALL)
    for array in first.values():
        assert np.array_equal(array, RECORDING)
        array.fill(-1)
        assert np.array_equal(theirs, RECORDING)
    assert all(np.array_equal(array, RECORDING) for array in second.values())
    assert np.array_equal(np.load(tmp_path / "x.npy"), RECORDING)


def test_memory_is_used_again_when_a_chunk_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_LENT_BYTES", 0)  # lend small arrays, too
    rows = function_rows(lambda a, b: (RECORDING[a:b], RECORDING[a:b, :1]))
    places = {rows.read(span)["0"].ctypes.data for span in (ALL, Span(0, 5), Span(3, 6), ALL)}
    assert len(places) == 1
    kept = rows.read(ALL)
    assert rows.read(ALL)["0"].ctypes.data != kept["0"].ctypes.data


def test_shapes_and_dtypes_may_change_between_calls() -> None:
    given = iter([RECORDING, (RECORDING[:, :2].astype("i2"), RECORDING[:, 0]), [RECORDING > 3]])
    rows = function_rows(lambda a, b: next(given))
    found = [[(array.dtype.str, array.shape) for array in rows.read(ALL).values()] for _ in range(3)]
    assert found == [[("<f8", (6, 4))], [("<i2", (6, 2)), ("<f8", (6,))], [("|b1", (6, 4))]]


@pytest.mark.parametrize(
    "strange", [np.asfortranarray(RECORDING), RECORDING.astype(">f8"), RECORDING.repeat(2, axis=1)[:, ::2]]
)
def test_arrays_in_any_layout_come_as_plain_arrays(strange: np.ndarray) -> None:
    (array,) = function_rows(lambda a, b: strange).read(ALL).values()
    assert (array.flags.c_contiguous, array.dtype) == (True, np.dtype("f8"))
    assert np.array_equal(array, RECORDING)


def test_tensors_come_as_arrays() -> None:
    (array,) = function_rows(lambda a, b: torch.from_numpy(RECORDING)[a:b]).read(Span(2, 4)).values()
    assert np.array_equal(array, RECORDING[2:4])


def test_any_rows_are_taken_with_a_call_for_each_run() -> None:
    calls: list[Window] = []

    def load(start: int, stop: int) -> np.ndarray:
        calls.append((start, stop))
        return RECORDING[start:stop]

    items = np.array([3, 4, 5, 0, 2])
    assert np.array_equal(function_rows(load).take(items)["0"], RECORDING[items])
    assert calls == [(3, 6), (0, 1), (2, 3)]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_value", "words"),
    [
        (np.zeros((5, 2)), r"load_fn\(0, 6\) must return arrays with 6 rows on axis 0, got shape \(5, 2\)"),
        ((np.zeros((6, 2)), np.zeros((7, 2))), r"shape \(7, 2\)"),
        (None, "must return at least one array, got none"),
        ((), "must return at least one array, got none"),
        (np.array([None] * 6), "must return arrays of numbers, got object"),
        (np.array(["a"] * 6), "must return arrays of numbers, got <U1"),
    ],
)
def test_what_is_no_array_of_these_rows_is_refused_with_the_required_one(given_value: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        function_rows(lambda a, b: given_value).read(ALL)
    assert any("chunk from 0 to 6" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("kind", [Mishap, IndexError])
def test_an_error_of_the_function_is_the_very_object_and_says_which_chunk(kind: type[Exception]) -> None:
    def load(start: int, stop: int) -> Any:
        return mishap_in_the_users_code("load", start) if kind is Mishap else [][start]

    with RandomChunkLoader(load, ROWS, ROWS, "cpu") as loader:
        loader.start_epoch(2)
        for _ in range(2):
            with pytest.raises(kind) as caught:
                loader.get_next_chunk()
            assert type(caught.value) is kind
            assert any("chunk from 0 to 6" in note for note in caught.value.__notes__)
