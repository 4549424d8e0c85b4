"""Selection of arrays and columns in ZarrSource: what it delivers, how much it reads, and what it refuses."""

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from penstock import DamageError, OptionError, Plan, ReadError, SourceError, Span, WindowShuffle
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr import array as zarr_store


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray:
    """Return an array of distinct values; none is 0."""
    return np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)


def write(path: Path, data: np.ndarray, chunks: tuple[int, ...], **options: Any) -> Path:
    """Write zarr v2 without a fill value, so that a missing chunk is an error."""
    options = {"zarr_format": 2, "compressors": None, "filters": None, "fill_value": None, **options}
    zarr.create_array(path, shape=data.shape, chunks=chunks, dtype=data.dtype, **options)[...] = data
    return path


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """An array of time, neurons and columns, with one column per chunk."""
    data = numbers(22, 6, 4)
    write(tmp_path / "timeseries.zarr", data, (5, 6, 1))
    return tmp_path, data


# -- selections --------------------------------------------------------------------------------------------------------

SELECTIONS: dict[str, tuple[Any, ...]] = {
    "nothing said": (),
    "a number": (slice(None), 1),
    "a number from the end": (slice(None), -1),
    "a number of numpy": (np.int64(2), np.int32(3)),
    "a range": (slice(1, 4),),
    "an open range": (slice(2, None), slice(None, 2)),
    "a range from the end": (slice(-3, -1), 0),
    "a range with a step of 1": (slice(0, 6, 1), 2),
    "an empty range": (slice(0, 0), 1),
    "a range that ends before it begins": (slice(4, 2), 1),
    "a range of numpy": (slice(np.int64(1), np.int64(3)),),
    "all of it": (slice(0, 6), slice(0, 4)),
}


@pytest.mark.parametrize("keys", SELECTIONS.values(), ids=SELECTIONS)
def test_a_selection_gives_what_numpy_would(recording: tuple[Path, np.ndarray], keys: tuple[Any, ...]) -> None:
    folder, data = recording
    source = ZarrSource(folder, {"x": ("timeseries.zarr", *keys)})
    wanted = data[(slice(None), *keys)]
    assert source.fields["x"].shape == wanted.shape[1:]
    assert source.read(Span(0, 22))["x"].tobytes() == wanted.tobytes()
    items = np.array([21, 3, 3, 10])
    assert source.take(items)["x"].tobytes() == wanted[items].tobytes()


WRONG: dict[str, tuple[Any, str]] = {
    "past the end": ((6,), "must select a number or a range within an axis of 6, got 6"),
    "before the beginning": ((-7,), "within an axis of 6, got -7"),
    "a range past the end": ((slice(0, 7),), r"range with step 1 within an axis of 6, got slice\(0, 7, None\)"),
    "a range from past the end": ((slice(8, None),), "range with step 1 within an axis of 6"),
    "a range from before the beginning": ((slice(-9, None),), "range with step 1 within an axis of 6"),
    "a step": ((slice(0, 6, 2),), "range with step 1"),
    "backwards": ((slice(None, None, -1),), "range with step 1"),
    "a range of text": ((slice("a", "b"),), "range with step 1"),
    "a range of fractions": ((slice(0.5, 2.5),), "range with step 1"),
    "a list": (([0, 1],), r"a number or a range within an axis of 6, got \[0, 1\]"),
    "an ellipsis": ((...,), "got Ellipsis"),
    "a truth value": ((True,), "within an axis of 6, got True"),
    "None": ((None,), "got None"),
    "too many axes": ((0, 0, 0), r"at most 2 axes, the axes of .*timeseries\.zarr besides rows, got 3"),
}


@pytest.mark.parametrize(("keys", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_selection_is_refused_with_its_field(
    recording: tuple[Path, np.ndarray], keys: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(OptionError, match=f"Field 'volts' .*{message}"):
        ZarrSource(recording[0], {"volts": ("timeseries.zarr", *keys)})


@pytest.mark.parametrize(
    "fields", ["timeseries.zarr", [], {}, {"x": 5}, {"x": ()}, {"x": (1, 2)}, {"x": None}, {1: "a"}]
)
def test_fields_that_are_not_arrays_are_refused(recording: tuple[Path, np.ndarray], fields: Any) -> None:
    with pytest.raises(OptionError, match="must be"):
        ZarrSource(recording[0], fields)


# -- pushed down -------------------------------------------------------------------------------------------------------


def test_chunks_outside_of_the_selection_are_not_read(recording: tuple[Path, np.ndarray]) -> None:
    folder, data = recording
    store = folder / "timeseries.zarr"
    for row in range(5):
        (store / f"{row}.0.0").unlink()
        (store / f"{row}.0.2").write_bytes(b"not a chunk")
    source = ZarrSource(folder, {"x": ("timeseries.zarr", slice(1, 4), 1), "y": ("timeseries.zarr", slice(None), 3)})
    block = source.read(Span(0, 22))
    assert block["x"].tobytes() == data[:, 1:4, 1].tobytes()
    assert block["y"].tobytes() == data[:, :, 3].tobytes()
    for column in (0, 2):
        with pytest.raises(DamageError, match=rf"chunk \(0, 0, {column}\) of .*timeseries\.zarr"):
            ZarrSource(folder, {"z": ("timeseries.zarr", 0, column)}).read(Span(0, 1))


def test_rows_outside_of_the_request_are_not_read(recording: tuple[Path, np.ndarray]) -> None:
    folder, data = recording
    for path in (folder / "timeseries.zarr").glob("2.*"):
        path.unlink()
    source = ZarrSource(folder, {"x": "timeseries.zarr"})
    items = np.array([21, 0, 9, 15])
    assert source.take(items)["x"].tobytes() == data[items].tobytes()
    assert source.read(Span(3, 10))["x"].tobytes() == data[3:10].tobytes()
    with pytest.raises(DamageError, match=r"chunk \(2, 0, 0\)"):
        source.take(np.array([0, 10]))


def test_each_chunk_is_read_once_for_any_number_of_items(
    recording: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = recording
    read: list[tuple[int, ...]] = []
    real = zarr_store.ChunkRead.__call__
    monkeypatch.setattr(zarr_store.ChunkRead, "__call__", lambda self: (read.append(self.coordinates), real(self))[1])
    items = np.array([21, 4, 0, 4, 20, 3, 0])
    source = ZarrSource(folder, {"x": ("timeseries.zarr", slice(None), 1)}, threads=1)
    assert source.take(items)["x"].tobytes() == data[items][:, :, 1].tobytes()
    assert read == [(0, 0, 1), (4, 0, 1)]


# -- read amplification ------------------------------------------------------------------------------------------------


def amplification(store: Path, span: Span, *keys: Any) -> float:
    return ZarrSource(store.parent, {"x": (store.name, *keys)}).read_amplification(span)["x"]


@pytest.mark.parametrize("compressed", [False, True])
def test_whole_chunks_of_one_column_are_read_without_waste(tmp_path: Path, compressed: bool) -> None:
    more = {"compressors": "auto"} if compressed else {}
    store = write(tmp_path / "t", numbers(4000, 7, 4), (2000, 7, 1), **more)
    assert amplification(store, Span(0, 4000), slice(None), 1) == 1.0
    assert amplification(store, Span(2000, 4000), slice(0, 7), 2) == 1.0
    assert amplification(store, Span(0, 2000)) == 1.0
    # Half of the rows: compressed ones have to be decoded all the same.
    assert amplification(store, Span(0, 1000), slice(None), 1) == (2.0 if compressed else 1.0)
    assert amplification(store, Span(1999, 2001), slice(None), 1) == (2000.0 if compressed else 1.0)
    # Two of seven neurons: all are read.
    assert amplification(store, Span(0, 2000), slice(0, 2), 1) == 3.5


def test_a_last_chunk_that_extends_beyond_the_array_counts_as_a_whole_chunk(tmp_path: Path) -> None:
    store = write(tmp_path / "t", numbers(15, 3), (10, 2), compressors="auto")
    assert amplification(store, Span(0, 15)) == 2 * 2 * 20 / (15 * 3)


def test_nothing_is_decoded_for_empty_spans_and_missing_chunks(tmp_path: Path) -> None:
    store = write(tmp_path / "t", numbers(10, 2), (5, 2), fill_value=0)
    assert amplification(store, Span(3, 3)) == 0.0
    (store / "0.0").unlink()
    assert amplification(store, Span(0, 10)) == 0.5
    with pytest.raises(ReadError, match=r"items 9–10 of .* it has items 0–9"):
        amplification(store, Span(9, 11))


def test_npy_columns_are_read_with_their_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", numbers(10, 4))
    assert amplification(tmp_path / "a.npy", Span(2, 7)) == 1.0
    assert amplification(tmp_path / "a.npy", Span(2, 7), 0) == 4.0


# -- several arrays ----------------------------------------------------------------------------------------------------


@given(rows=st.lists(st.integers(1, 12), min_size=2, max_size=3), items=st.lists(st.integers(0, 22), max_size=9))
def test_arrays_with_different_chunks_are_read_side_by_side(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], items: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("side")
    arrays = {f"a{k}": numbers(23, k + 1) + 1000 * k for k in range(len(rows))}
    for chunk, (name, array) in zip(rows, arrays.items(), strict=True):
        write(folder / name, array, (chunk, 2))
    source = ZarrSource(folder)
    assert list(source.fields) == sorted(arrays)
    whole, some = source.read(Span(0, 23)), source.take(np.array(items, np.int64))
    for name, array in arrays.items():
        assert whole[name].tobytes() == array.tobytes()
        assert some[name].tobytes() == array[items].tobytes()
    shutil.rmtree(folder)


@pytest.mark.parametrize(("rows", "borders"), [((5, 5), 5), ((5, 10), 10), ((100, 5), 23)])
def test_chunks_of_the_index_are_those_of_the_store(tmp_path: Path, rows: tuple[int, int], borders: int) -> None:
    for name, chunk in zip("ab", rows, strict=True):
        write(tmp_path / name, numbers(23, 2), (chunk, 1))
    index = ZarrSource(tmp_path).index
    assert index.chunk_starts(np.arange(index.n_chunks)).tolist() == list(range(0, 23, borders))
    sizes = index.chunk_sizes(np.arange(index.n_chunks)).tolist()
    assert sizes == [min(borders, 23 - start) for start in range(0, 23, borders)]
    plan = Plan(index, WindowShuffle(window=1), batch_size=4, tail="short")
    drawn = [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    visited = [item // borders for batch in drawn for item in batch]
    changes = sum(a != b for a, b in itertools.pairwise(visited))
    assert changes == len(sizes) - 1, "a window of one chunk leaves each storage chunk once"


def test_arrays_of_different_length_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a", numbers(10), (5,))
    write(tmp_path / "b", numbers(11), (5,))
    with pytest.raises(SourceError, match=r"same number of rows, got \{'a': 10, 'b': 11\}"):
        ZarrSource(tmp_path)


def test_a_folder_gives_its_arrays_and_an_array_gives_itself(tmp_path: Path) -> None:
    write(tmp_path / "b", numbers(4), (2,))
    write(tmp_path / "a", numbers(4, 2), (2, 2), zarr_format=3, fill_value=0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("no array")
    assert {name: field.shape for name, field in ZarrSource(tmp_path).fields.items()} == {"a": (2,), "b": ()}
    for name in "ab":
        assert list(ZarrSource(tmp_path / name).fields) == ["data"]
    assert list(ZarrSource(tmp_path, ["b"]).fields) == ["b"]
    assert "4 items of a, b" in repr(ZarrSource(os.fspath(tmp_path)))


def test_a_zarr_group_gives_the_arrays_in_it(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "group", mode="w")
    group.create_array("x", data=numbers(4))
    group.create_group("deep").create_array("y", data=numbers(4, 2))
    assert list(ZarrSource(tmp_path / "group").fields) == ["x"]
    block = ZarrSource(tmp_path / "group", {"x": "x", "y": ("deep/y", 1)}).read(Span(0, 4))
    assert block["y"].tolist() == [2, 4, 6, 8]
    with pytest.raises(SourceError, match=r"group/deep must be a zarr array, got a group; name an array in it"):
        ZarrSource(tmp_path / "group", ["deep"])


@pytest.mark.parametrize("name", ["nothing", "nothing/x.npy", "nothing.h5/x"])
def test_a_missing_array_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=f"No array at .*{name}"):
        ZarrSource(tmp_path, [name])
    with pytest.raises(SourceError, match=r"No zarr arrays in .*empty\. Give the folder of the arrays"):
        ZarrSource(tmp_path / "empty")
    with pytest.raises(SourceError, match=r"neither zarr\.json nor \.zarray"):
        ZarrSource(tmp_path, ["empty"])


# -- identity and memory -----------------------------------------------------------------------------------------------


def test_the_identity_depends_on_the_content_and_the_selection(tmp_path: Path) -> None:
    data = numbers(10, 3)
    stores = {"one": data, "same": data, "row": data.copy(), "type": data.astype("i4"), "shape": data[:, :2]}
    stores["row"][7] += 1
    for name, array in stores.items():
        write(tmp_path / name, array, (2, array.shape[1]))
    digests = {name: ZarrSource(tmp_path, {"x": name}).index.digest for name in stores}
    assert digests.pop("same") == digests["one"]
    digests |= {f"columns {k}": ZarrSource(tmp_path, {"x": ("one", k)}).index.digest for k in range(3)}
    digests["name"] = ZarrSource(tmp_path, {"y": "one"}).index.digest
    assert len(set(digests.values())) == len(digests)
    shutil.move(tmp_path / "one", tmp_path / "moved")
    assert ZarrSource(tmp_path, {"x": "moved"}).index.digest == digests["one"]


WRONG_OUT = {
    "another type": np.zeros((4, 3), "f8"),
    "another type of that size": np.zeros((4, 3), "i4"),
    "another byte order": np.zeros((4, 3), ">f4"),
    "another shape of that size": np.zeros((3, 4), "f4"),
    "too few rows": np.zeros((3, 3), "f4"),
    "too many rows": np.zeros((5, 3), "f4"),
}


@pytest.mark.parametrize("out", WRONG_OUT.values(), ids=WRONG_OUT)
def test_out_of_another_shape_or_dtype_is_refused_and_left_unchanged(tmp_path: Path, out: np.ndarray) -> None:
    source = ZarrSource(write(tmp_path / "a", numbers(10, 3), (5, 3)))
    for fill in (lambda: source.read(Span(2, 6), {"data": out}), lambda: source.take(np.arange(4), {"data": out})):
        with pytest.raises(OptionError, match=r"out\['data'\] must be an array of float32 \(4, 3\), got "):
            fill()
    assert not out.any()


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2"])
def test_threads_must_be_an_integer_of_1_or_more(tmp_path: Path, threads: Any) -> None:
    write(tmp_path / "a", numbers(4), (2,))
    with pytest.raises(OptionError, match="threads"):
        ZarrSource(tmp_path, threads=threads)
