import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_source_suite import Case, ShortSuite, SourceSuite

from penstock import ArraySource, Loader, OptionError, Plan, ReadError, Sequential, SourceError, Span

N = 23


def encoded(n: int, shape: tuple[int, ...], dtype: str, offset: int = 0) -> np.ndarray:
    """Return n items in which all values are distinct."""
    size = int(np.prod(shape, dtype=int))
    numbers = (np.arange(n)[:, None] * (size + 3) + np.arange(size) + offset).reshape(n, *shape)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return (numbers * 2654435761 >> 7) % 2 == 1
    if kind.kind == "c":
        return (numbers + 1j * (numbers + 0.5)).astype(kind)
    if kind.kind in "US":
        return np.char.add("i", numbers.astype("U6")).astype(kind)
    if kind.kind in "mM":
        return numbers.astype("i8").view("M8[s]" if kind.kind == "M" else "m8[s]").astype(kind)
    return numbers.astype(kind)


def case_of(make_array: Callable[[int], Any], truth: np.ndarray | None = None) -> Case:
    """Return a case with one field, and with a second field."""
    native = np.asarray(make_array(0)) if truth is None else truth
    native = native.astype(native.dtype.newbyteorder("="))
    beside = np.arange(len(native), dtype=np.int16)

    def make(offset: int) -> ArraySource:
        return ArraySource({"a": make_array(offset), "beside": beside}, chunk_items=5)

    return Case(
        make=partial(make, 0),
        truth=lambda item: {"a": native[item], "beside": beside[item]},
        n_items=len(native),
        other=partial(make, 1),
    )


IN_MEMORY = {
    "int64": ((), "i8"),
    "0-d items of float16": ((), "f2"),
    "big-endian float32": ((4,), ">f4"),
    "big-endian int16, two axes": ((2, 3), ">i2"),
    "little-endian uint32": ((3,), "<u4"),
    "bool": ((9,), "?"),
    "uint16": ((3,), "u2"),
    "uint64": ((1,), "u8"),
    "complex64": ((2,), "c8"),
    "big-endian complex128": ((2,), ">c16"),
    "three axes": ((2, 3, 4), "f4"),
    "strings": ((), "U8"),
    "bytes": ((2,), "S7"),
    "times": ((), "M8[s]"),
}


class TestArraysInMemory(ShortSuite):
    @pytest.fixture(params=IN_MEMORY.values(), ids=IN_MEMORY)
    def case(self, request: pytest.FixtureRequest) -> Case:
        shape, dtype = request.param
        return case_of(lambda offset: encoded(N, shape, dtype, offset))


VIEWS = {
    "every second": lambda whole: whole[::2],
    "backwards": lambda whole: whole[::-1],
    "from the fifth on": lambda whole: whole[5:],
    "columns": lambda whole: whole[:, 1:3],
    "columns backwards, every third": lambda whole: whole[1::3, ::-1],
    "transposed": lambda whole: whole.reshape(-1, N).T,
    "fortran": np.asfortranarray,
    "read-only": lambda whole: np.broadcast_to(whole[:, :1], whole.shape),
}


class TestViewsInMemory(ShortSuite):
    @pytest.fixture(params=VIEWS.values(), ids=VIEWS)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return case_of(lambda offset: request.param(encoded(N, (4,), "i4", offset)))


class TestOtherKindsOfArrays(ShortSuite):
    @pytest.fixture(params=["tensor", "list", "structured"])
    def case(self, request: pytest.FixtureRequest) -> Case:
        def make(offset: int) -> Any:
            numbers = encoded(N, (3,), "i8", offset)
            if request.param == "tensor":
                return torch.from_numpy(numbers)
            if request.param == "list":
                return numbers.tolist()
            pairs = np.zeros(N, [("i", ">i4"), ("f", "f8", (2,))])
            pairs["i"], pairs["f"] = numbers[:, 0], numbers[:, 1:]
            return pairs

        return case_of(make)


class TestItemsOfNoSize(SourceSuite):
    @pytest.fixture
    def case(self) -> Case:
        def make(offset: int) -> ArraySource:
            numbers = np.arange(N) + offset
            return ArraySource({"nothing": np.zeros((N, 0, 3), "f4"), "x": numbers})

        return Case(
            partial(make, 0), lambda item: {"nothing": np.zeros((0, 3), "f4"), "x": np.int64(item)}, N, partial(make, 1)
        )


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Any]:
    """Save an array and map it."""

    def save(array: np.ndarray, name: str = "array.npy", mode: str = "r") -> Any:
        np.save(tmp_path / name, array)
        return np.load(tmp_path / name, mmap_mode=mode)

    return save


class TestMemoryMaps(SourceSuite):
    @pytest.fixture(params=[((), "i8"), ((3,), ">f4"), ((2, 2), "?"), ((5,), "u2"), ((), "U8"), ((2,), "c8")], ids=str)
    def case(self, request: pytest.FixtureRequest, saved: Callable[..., Any]) -> Case:
        shape, dtype = request.param
        return case_of(
            lambda offset: saved(encoded(N, shape, dtype, offset), f"{offset}.npy"), encoded(N, shape, dtype)
        )


class TestViewsOfMemoryMaps(ShortSuite):
    @pytest.fixture(params=VIEWS.values(), ids=VIEWS)
    def case(self, request: pytest.FixtureRequest, saved: Callable[..., Any]) -> Case:
        def make(offset: int) -> Any:
            return request.param(saved(encoded(N, (4,), "i4", offset), f"{offset}.npy"))

        return case_of(make, np.array(request.param(encoded(N, (4,), "i4"))))


class TestRawMemoryMapWithAnOffset(ShortSuite):
    @pytest.fixture(params=["whole", "view", "view of a view", "asarray"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        def make(offset: int) -> Any:
            path = tmp_path / f"{offset}.raw"
            # Beyond the first page, where numpy maps from a page border and not from the offset itself.
            path.write_bytes(b"?" * 5003 + encoded(40, (4,), ">i4", offset).tobytes())
            mapped = np.memmap(path, ">i4", mode="r", offset=5003, shape=(40, 4))
            if request.param == "whole":
                return mapped
            if request.param == "view":
                return mapped[3:]
            return mapped[1:][::2][:, 1:] if request.param == "view of a view" else np.asarray(mapped)

        return case_of(make, np.array(make(0)))


class TestMapThatShrinks:
    """Without protection, the kernel would end the process with SIGBUS."""

    ROWS = encoded(64, (1024,), "i4")

    def test_what_is_gone_is_an_error_and_what_is_there_is_read(
        self, saved: Callable[..., Any], tmp_path: Path
    ) -> None:
        source = ArraySource({"y": np.arange(64), "x": saved(self.ROWS)})
        path = tmp_path / "array.npy"
        whole = path.read_bytes()
        os.truncate(path, 10 * 4096)  # the header is 128 bytes: rows 0 to 8 are whole
        assert source.take(np.array([8, 0]))["x"].tolist() == self.ROWS[[8, 0]].tolist()
        assert source.read(Span(2, 9))["x"].tolist() == self.ROWS[2:9].tolist()
        for gone in (lambda: source.take(np.array([3, 20, 5])), lambda: source.read(Span(20, 30))):
            with pytest.raises(ReadError, match=r"item 20 of field 'x'.*array\.npy was truncated"):
                gone()
        with pytest.raises(ReadError, match=r"item 9 of field 'x'"):
            source.read(Span(2, 30))
        path.write_bytes(whole)
        assert source.take(np.array([3, 20]))["x"].tolist() == self.ROWS[[3, 20]].tolist()

    def test_what_is_gone_within_a_page_is_an_error_and_not_zeros(
        self, saved: Callable[..., Any], tmp_path: Path
    ) -> None:
        small = encoded(64, (4,), "i4")  # in one page, which stays there until nothing of it is left
        source = ArraySource({"x": saved(small)})
        os.truncate(tmp_path / "array.npy", 128 + 10 * 16 + 3)
        assert source.take(np.array([9, 0]))["x"].tolist() == small[[9, 0]].tolist()
        assert source.read(Span(0, 10))["x"].tolist() == small[:10].tolist()
        for gone in (lambda: source.take(np.array([3, 10, 5])), lambda: source.read(Span(9, 12))):
            with pytest.raises(ReadError, match=r"item 10 of field 'x'.*array\.npy was truncated"):
                gone()

    def test_a_file_that_was_replaced_is_still_read_as_it_was(self, saved: Callable[..., Any], tmp_path: Path) -> None:
        small = encoded(64, (4,), "i4")
        source = ArraySource({"x": saved(small)})
        (tmp_path / "short").write_bytes(b"short")
        (tmp_path / "short").replace(tmp_path / "array.npy")
        assert source.take(np.array([63, 0]))["x"].tolist() == small[[63, 0]].tolist()
        (tmp_path / "array.npy").unlink()
        assert source.read(Span(60, 64))["x"].tolist() == small[60:].tolist()

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_loader_ends_with_that_error(self, saved: Callable[..., Any], tmp_path: Path, num_workers: int) -> None:
        source = ArraySource({"x": saved(self.ROWS)})
        plan = Plan(source.index, Sequential(), batch_size=4)
        with Loader(source, plan, num_workers=num_workers) as loader:
            os.truncate(tmp_path / "array.npy", 0)
            with pytest.raises(ReadError, match="was truncated"):
                next(iter(loader))

    def test_room_of_another_kind_is_not_taken_for_bytes(self, saved: Callable[..., Any]) -> None:
        source, items = ArraySource({"x": saved(self.ROWS)}), np.array([7, 3])
        wide = {"x": np.zeros((2, 1024), np.int64)}
        assert source.read(Span(3, 5), wide)["x"].tolist() == self.ROWS[3:5].tolist()
        for room in (wide, {"x": np.zeros((2, 512), np.int32)}, {"x": np.zeros((3, 1024), np.int32)}):
            with pytest.raises((TypeError, ValueError)):
                source.take(items, room)
        apart = {"x": np.zeros((2, 2048), np.int32)[:, ::2]}
        assert source.take(items, apart)["x"].tolist() == self.ROWS[items].tolist()


class TestSavedViews:
    def test_a_memory_map_pickles_as_where_it_lies(self, saved: Callable[..., Any]) -> None:
        big = encoded(50_000, (8,), "f4")
        source = ArraySource({"a": saved(big)[::-3, 2:5], "b": saved(big, "other.npy")[:16_667]})
        source.take(np.array([7]))
        assert len(pickle.dumps(source)) < 2000

    def test_a_pickled_memory_map_reads_the_file_and_no_copy_of_it(
        self, saved: Callable[..., Any], tmp_path: Path
    ) -> None:
        pickled = pickle.dumps(ArraySource({"a": saved(np.arange(N))}))
        writable = np.load(tmp_path / "array.npy", mmap_mode="r+")
        writable[4] = 400
        writable.flush()
        assert pickle.loads(pickled).take(np.array([4, 5]))["a"].tolist() == [400, 5]

    @pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
    @pytest.mark.parametrize("view", ["whole", "backwards", "columns"])
    def test_a_file_that_is_gone_or_short_is_named_with_the_field(
        self, saved: Callable[..., Any], tmp_path: Path, damage: str, view: str
    ) -> None:
        views = {"whole": np.s_[:], "backwards": np.s_[::-1], "columns": np.s_[:, 1:]}
        source = ArraySource({"fine": np.arange(N), "gone": saved(encoded(N, (3,), "f8"), "here.npy")[views[view]]})
        path = tmp_path / "here.npy"
        again = pickle.loads(pickle.dumps(source))
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: -100 if damage == "truncated" else 0])
        for read in (lambda: again.take(np.array([0])), lambda: again.read(Span(0, 2))):
            with pytest.raises(ReadError, match=r"(?s)'gone'.*here\.npy"):
                read()

    def test_a_file_that_comes_back_is_read_again(self, saved: Callable[..., Any], tmp_path: Path) -> None:
        again = pickle.loads(pickle.dumps(ArraySource({"a": saved(np.arange(N))})))
        (tmp_path / "array.npy").rename(tmp_path / "away.npy")
        with pytest.raises(ReadError):
            again.take(np.array([1]))
        (tmp_path / "away.npy").rename(tmp_path / "array.npy")
        assert again.take(np.array([1]))["a"].tolist() == [1]

    @pytest.mark.parametrize("after", ["close", "pickle"])
    def test_changes_to_a_copy_on_write_map_are_not_lost(self, saved: Callable[..., Any], after: str) -> None:
        mapped = saved(np.arange(N), mode="c")
        mapped[3] = 333  # in this process only: the file still says 3
        source = ArraySource({"a": mapped})
        assert source.take(np.array([3]))["a"].tolist() == [333]
        if after == "close":
            source.close()
        else:
            source = pickle.loads(pickle.dumps(source))
        assert source.take(np.array([3]))["a"].tolist() == [333]


class TestIdentity:
    @pytest.mark.parametrize(
        "other",
        [
            {"a": np.arange(N) + 1},
            {"b": np.arange(N)},
            {"a": np.arange(N, dtype="i4")},
            {"a": np.arange(N)[:, None]},
            {"a": np.arange(N + 1)},
            {"a": np.arange(N), "b": np.arange(N)},
        ],
        ids=["values", "name", "dtype", "shape", "length", "one more field"],
    )
    def test_another_array_has_another_identity(self, other: dict[str, np.ndarray]) -> None:
        assert ArraySource(other).index.digest != ArraySource({"a": np.arange(N)}).index.digest

    def test_the_order_in_which_fields_are_given_does_not_matter(self) -> None:
        a, b = np.arange(N), np.arange(N) * 2
        assert ArraySource({"a": a, "b": b}).index.digest == ArraySource({"b": b, "a": a}).index.digest

    def test_where_the_content_lies_does_not_matter(self, saved: Callable[..., Any]) -> None:
        mapped = ArraySource({"a": saved(np.arange(N))})
        assert mapped.index.digest == ArraySource({"a": np.arange(N)}).index.digest

    def test_the_last_item_counts(self) -> None:
        changed = np.arange(1000)
        changed[-1] = 0
        assert ArraySource({"a": changed}).index.digest != ArraySource({"a": np.arange(1000)}).index.digest


class TestChunks:
    def test_chunks_are_as_large_as_asked_for(self) -> None:
        index = ArraySource({"a": np.arange(N)}, chunk_items=5).index
        assert index.chunk_sizes(np.arange(index.n_chunks)).tolist() == [5, 5, 5, 5, 3]

    def test_chunks_are_about_a_megabyte_by_default(self) -> None:
        index = ArraySource({"a": np.broadcast_to(np.float32(0), (10_000, 1024)), "b": np.zeros(10_000)}).index
        assert index.largest_chunk * 4104 <= 2**20 < (index.largest_chunk + 1) * 4104

    def test_an_item_larger_than_a_chunk_is_a_chunk(self) -> None:
        index = ArraySource({"a": np.broadcast_to(np.float32(0), (7, 1 << 20))}).index
        assert (index.largest_chunk, index.n_chunks) == (1, 7)

    @pytest.mark.parametrize("chunk", [0, -3])
    def test_a_chunk_of_nothing_is_refused(self, chunk: int) -> None:
        with pytest.raises(SourceError, match=f"chunk must be an integer >= 1, got {chunk}"):
            ArraySource({"a": np.arange(N)}, chunk_items=chunk)


class TestBadInput:
    @pytest.mark.parametrize("given", [np.arange(3), [np.arange(3)], None, "abc"], ids=repr)
    def test_something_that_is_no_mapping_is_refused(self, given: Any) -> None:
        with pytest.raises(SourceError, match=f"mapping of names to arrays.*got {type(given).__name__}"):
            ArraySource(given)

    def test_no_arrays_are_refused(self) -> None:
        with pytest.raises(SourceError, match="at least one array"):
            ArraySource({})

    @pytest.mark.parametrize("shape", [(0,), (0, 5)])
    def test_zero_items_are_refused_by_name(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(SourceError, match=r"empty arrays \(trials, times\)"):
            ArraySource({"trials": np.zeros(shape), "times": np.zeros(0)})

    def test_fields_of_different_length_are_listed(self) -> None:
        with pytest.raises(SourceError, match="x has 3, y has 3, z has 4"):
            ArraySource({"x": np.zeros(3), "y": np.zeros((3, 2)), "z": np.zeros(4)})

    @pytest.mark.parametrize(
        "objects", [np.array([None, {}]), np.zeros(2, [("a", "O")])], ids=["object", "in a struct"]
    )
    def test_python_objects_are_refused_by_field(self, objects: np.ndarray) -> None:
        with pytest.raises(SourceError, match=r"'things' must hold numbers.*Python objects"):
            ArraySource({"fine": np.zeros(2), "things": objects})

    def test_a_single_value_is_refused_by_field(self) -> None:
        with pytest.raises(SourceError, match=r"'rate' must have one axis or more.*a single value"):
            ArraySource({"rate": np.float64(30_000)})

    @pytest.mark.parametrize("name", [0, None, ("a", "b"), ""], ids=repr)
    def test_a_name_that_is_no_string_is_refused(self, name: Any) -> None:
        with pytest.raises(SourceError, match="field name must be a non-empty string"):
            ArraySource({name: np.arange(3)})

    def test_it_is_an_option_error_and_a_value_error(self) -> None:
        with pytest.raises(OptionError):
            ArraySource({})
        with pytest.raises(ValueError, match="at least one array"):
            ArraySource({})

    def test_reading_past_the_end_names_the_items_and_the_source(self) -> None:
        with pytest.raises(ReadError, match=r"items 20–29 of ArraySource\(23 items of a\)"):
            ArraySource({"a": np.arange(N)}).read(Span(20, 30))
