"""Items in tar shards, of every layout there is: what was written is what is read, in any order, by anyone."""

import ctypes
import io
import json
import mmap
import multiprocessing as mp
import os
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, SourceSuite, same
from penstock_test_parts import answer, eventually, open_files, script

from penstock import (
    ArraySource,
    Concat,
    DamageError,
    Index,
    OptionError,
    ReadError,
    Source,
    SourceError,
    Span,
    Take,
    TarSource,
    WebDatasetWriter,
    Zip,
)
from penstock.shard.foreign import index_archives

# -- data sets: item i of one that was made with `offset` holds i + offset ---------------------------------------------

Sample = dict[str, Any]
Truth = Callable[[int], Sample]


def write(folder: Path, samples: Sequence[Sample], metadata: Sequence[Sample] | None = None, **options: Any) -> Truth:
    """Write samples; return what a reader of all fields must find."""
    options = {"shard_size": 4, **options}
    with WebDatasetWriter(folder, **options) as writer:
        for number, sample in enumerate(samples):
            writer.write_sample(sample, metadata=None if metadata is None else metadata[number])

    def truth(item: int) -> Sample:
        shard, row = divmod(item, options["shard_size"])
        own = {"sample_id": f"sample_{item:09d}", "modalities": list(samples[0])}
        place = {"shard_idx": shard, "sample_idx_in_shard": row}
        return {**samples[item], "metadata": {**own, **place, **(metadata[item] if metadata else {})}}

    return truth


def archive(path: Path, samples: Sequence[Mapping[str, bytes]], first: int = 0, **options: Any) -> None:
    """Write a tar as others do: members KEY.SUFFIX, by Python's own library."""
    with tarfile.open(path, "w", **options) as tar:
        for number, members in enumerate(samples, start=first):
            for suffix, payload in members.items():
                member = tarfile.TarInfo(f"{options.get('pax_headers', {}).get('prefix', 'item')}{number:05d}.{suffix}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))


def npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=False)
    return stream.getvalue()


def indexed(folder: Path) -> None:
    manifest, problems = index_archives(folder)
    assert (manifest is not None, problems) == (True, [])


def grid(value: int, dtype: str = "f4") -> np.ndarray:
    """Return a small array that no other one of another shape, order or number is equal to."""
    return (value * 100 + np.arange(6).reshape(2, 3)).astype(dtype)


def uniform(offset: int, n: int = 23) -> list[Sample]:
    return [{"x": np.int64(i + offset), "y": grid(i + offset)} for i in range(n)]


def _uniform(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    return write(folder, uniform(offset)), 23, {}


def _arrays_only(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    truth = write(folder, uniform(offset))
    return lambda i: {name: truth(i)[name] for name in ("y", "x")}, 23, {"fields": ["y", "x"]}


def _one_field(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    truth = write(folder, uniform(offset))
    return lambda i: {"y": truth(i)["y"]}, 23, {"fields": ["y"], "chunk_items": 3}


def _large(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    # Beyond 16 kB, fields are read straight into their place; the last one fills its last block exactly or not at all.
    samples = [
        {
            "a": np.full((70, 70), i + offset, np.float32),
            "small": np.int16(i + offset),
            "b": np.full(5000, i + offset, np.int64),
            "whole": np.full(20 * 512 - 128, (i + offset) % 200, np.uint8),
        }
        for i in range(9)
    ]
    return write(folder, samples), 9, {}


def _ragged(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    samples = [
        {"x": np.int32(i + offset), "events": np.arange(i % 4, dtype=np.float32) + i + offset, "id": np.uint8(i)}
        for i in range(23)
    ]
    return write(folder, samples), 23, {}


def _ragged_axes(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    # Also the number of axes differs: a single number, a row, a table.
    shapes = [(), (2,), (2, 3)]
    return write(folder, [{"v": np.full(shapes[i % 3], i + offset, np.int32)} for i in range(11)]), 11, {}


def _irregular(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    # Metadata of any length between the arrays: offsets follow no rule and are listed.
    about = [{"note": "n" * ((i * 7919) % 1700)} for i in range(23)]
    return write(folder, uniform(offset), about), 23, {}


def _irregular_arrays(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    truth = write(folder, uniform(offset), [{"note": "n" * ((i * 7919) % 1700)} for i in range(23)])
    return lambda i: {name: truth(i)[name] for name in ("x", "y")}, 23, {"fields": ["x", "y"]}


def _pyd(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    return write(folder, uniform(offset), array_format="pyd"), 23, {}


def _dtypes(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    record = np.dtype([("t", "i4"), ("v", "f8", (2,))])

    def sample(i: int) -> Sample:
        return {
            "flag": np.bool_(i % 2),
            "half": np.float16(i),
            "z": np.complex64(complex(i, -i)),
            "when": np.datetime64(i, "s") + np.arange(3).astype("m8[s]"),
            "long": np.timedelta64(i, "ms"),
            "name": np.array([f"unit {i:03d}", "ä"]),
            "raw": np.array([b"%03d" % i]),
            "rec": np.array([(i, (i, i + 0.5)), (i + 1, (0, -1))], record),
            "u": np.uint16(i),
        }

    return write(folder, [sample(i + offset) for i in range(9)]), 9, {}


def _nothing(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    samples = [{"none": np.zeros((0, 3), np.float32), "x": np.int64(i + offset)} for i in range(9)]
    return write(folder, samples), 9, {}


def _only_nothing(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    write(folder, [{"none": np.zeros((2, 0), np.float32), "x": np.int64(i + offset)} for i in range(9)])
    return lambda i: {"none": np.zeros((2, 0), np.float32)}, 9, {"fields": ["none"]}


def _objects(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    samples = [
        {
            "note": f"item {i + offset} — ä",
            "raw": bytes([i, 0, 255]) * i,
            "events": [i + offset, {"at": i / 2, "deep": [None, True]}],
            "maybe": None if i % 2 else {"k": i},
            "x": np.int64(i + offset),
        }
        for i in range(11)
    ]
    return write(folder, samples), 11, {}


def _undecoded(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    write(folder, uniform(offset))
    return (
        lambda i: {"x": npy(np.int64(i + offset)), "y": npy(grid(i + offset))},
        23,
        {
            "decode": False,
            "fields": ["x", "y"],
        },
    )


def _compressed(kind: str, **options: Any) -> Callable[[Path, int], tuple[Truth, int, Sample]]:
    def make(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
        about = [{"note": "n" * ((i * 7919) % 1700)} for i in range(23)]
        return write(folder, uniform(offset), about, compression=kind), 23, options

    return make


def _options(**options: Any) -> Callable[[Path, int], tuple[Truth, int, Sample]]:
    return lambda folder, offset: (write(folder, uniform(offset)), 23, options)


def _foreign_orders(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    """Fortran order and big-endian numbers, by Python's tarfile; they arrive in C order and native."""
    folder.mkdir()
    members = [
        {
            "f.npy": npy(np.asfortranarray(grid(i + offset))),
            "big.npy": npy(grid(i + offset, ">i4")),
            "both.npy": npy(np.asfortranarray(grid(i + offset, ">f8"))),
            "c.npy": npy(grid(i + offset)),
        }
        for i in range(11)
    ]
    for number, start in enumerate(range(0, 11, 4)):
        archive(folder / f"part-{number}.tar", members[start : start + 4], start)
    indexed(folder)

    def truth(i: int) -> Sample:
        kinds = {"f": "f4", "big": "i4", "both": "f8", "c": "f4"}
        return {name: grid(i + offset, dtype) for name, dtype in kinds.items()}

    return truth, 11, {}


def _foreign_geometry(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    """The same fields, in shards that lay them out differently: other order, other headers, other neighbours, gzip."""
    folder.mkdir()

    def members(i: int) -> dict[str, bytes]:
        return {"x.npy": npy(np.int64(i + offset)), "y.npy": npy(grid(i + offset))}

    rows = [members(i) for i in range(15)]
    archive(folder / "a.tar", rows[:4], 0)
    archive(folder / "b.tar", [dict(reversed(row.items())) for row in rows[4:7]], 4)
    long = {"format": tarfile.PAX_FORMAT, "pax_headers": {"prefix": "l" * 120}}
    archive(folder / "c.tar", rows[7:10], 7, **long)
    archive(folder / "d.tar", [{"x.npy": r["x.npy"], "txt": b"between", "y.npy": r["y.npy"]} for r in rows[10:12]], 10)
    with tarfile.open(folder / "e.tar.gz", "w:gz") as tar:
        for number, row in enumerate(rows[12:], start=12):
            for suffix, payload in row.items():
                member = tarfile.TarInfo(f"zipped{number}.{suffix}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))
    manifest, problems = index_archives(folder, allow_missing=True)
    assert (manifest is not None, problems) == (True, [])
    return lambda i: {"y": grid(i + offset), "x": np.int64(i + offset)}, 15, {"fields": ["y", "x"]}


def _foreign_dtypes(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    """A field that is no longer one dtype: each item keeps its own."""
    folder.mkdir()
    kinds = ["f4", "i8", "u1"]
    for number, kind in enumerate(kinds):
        rows = [
            {"v.npy": npy(grid((i + offset) % 2, kind)), "cls": b"%d" % (i + offset)}
            for i in range(4 * number, 4 * number + 4)
        ]
        archive(folder / f"{number}.tar", rows, 4 * number)
    indexed(folder)
    return lambda i: {"v": grid((i + offset) % 2, kinds[i // 4]), "cls": i + offset}, 12, {}


def _concat(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    folder.mkdir()
    first = write(folder / "first", uniform(offset, 9))
    second = write(folder / "second", uniform(offset + 9, 14), [{"note": "n" * (i * 97)} for i in range(14)])
    return lambda i: first(i) if i < 9 else second(i - 9), 23, {}


def _combined(kind: str) -> Callable[[Path, int], tuple[Truth, int, Sample]]:
    def make(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
        if kind == "concat":
            return _concat(folder, offset)
        truth = write(folder, uniform(offset), [{"note": "n" * (i * 97)} for i in range(23)])
        if kind == "take":
            return lambda i: truth((i * 5 + 2) % 23), 23, {}
        return lambda i: {**truth(i), "z": np.int64(i + offset)}, 23, {}

    return make


def _opened(name: str, folder: Path, options: Sample, offset: int) -> Source:
    if name == "concat":
        return Concat([TarSource(folder / "first"), TarSource(folder / "second", chunk_items=3)])
    if name == "take":
        return Take(TarSource(folder), (np.arange(23) * 5 + 2) % 23)
    if name == "zip":
        parts = [TarSource(folder, fields=["metadata", "x"]), ArraySource({"z": np.arange(23) + offset})]
        return Zip([*parts, TarSource(folder, fields=["y"])])
    return TarSource(folder, **options)


KINDS: dict[str, Callable[[Path, int], tuple[Truth, int, Sample]]] = {
    "uniform": _uniform,
    "arrays only": _arrays_only,
    "one field": _one_field,
    "large fields": _large,
    "ragged": _ragged,
    "ragged in the number of axes": _ragged_axes,
    "irregular metadata": _irregular,
    "arrays beside irregular metadata": _irregular_arrays,
    "pyd": _pyd,
    "dtypes": _dtypes,
    "items of no size": _nothing,
    "nothing but items of no size": _only_nothing,
    "objects": _objects,
    "not decoded": _undecoded,
    "gz": _compressed("gz"),
    "bz2": _compressed("bz2", chunk_items=2),
    "xz": _compressed("xz", verify="always"),
    "always verified": _options(verify="always", chunk_items=2),
    "never verified": _options(verify="never"),
    "substituting": _options(on_error="substitute", max_bad_items=0),
    "foreign orders": _foreign_orders,
    "foreign geometries": _foreign_geometry,
    "foreign dtypes": _foreign_dtypes,
    "concat": _combined("concat"),
    "take": _combined("take"),
    "zip": _combined("zip"),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return a function that makes each data set once."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            folder = tmp_path_factory.mktemp("sets")
            truth, n_items, options = KINDS[name](folder / "set", 0)
            KINDS[name](folder / "other", 1000)
            made[name] = Case(
                make=lambda: _opened(name, folder / "set", options, 0),
                truth=truth,
                n_items=n_items,
                other=lambda: _opened(name, folder / "other", options, 1000),
            )
        return made[name]

    return case


class TestTarSource(SourceSuite):
    @pytest.fixture(params=KINDS)
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
        return cases(request.param)

    def test_what_is_given_may_be_changed(self, case: Case, source: Source) -> None:
        # Objects are decoded anew for every reader; nobody else sees what becomes of them.
        for block in (source.read(Span(0, 4)), source.take(np.arange(4))):
            for array in block.values():
                for value in array if array.dtype.hasobject else ():
                    if isinstance(value, np.ndarray):
                        value[...] = np.zeros((), value.dtype)
                    elif isinstance(value, dict):
                        value.clear()
                array[...] = None if array.dtype.hasobject else np.zeros((), array.dtype)
        self.check(case, source.read(Span(0, 4)), range(4))

    def test_a_process_that_was_forked_in_the_middle_reads_on_its_own(self, case: Case, source: Source) -> None:
        source.take(np.arange(3))

        def read_all(sending: Any) -> None:
            try:
                self.check(case, source.take(np.arange(case.n_items)[::-1]), range(case.n_items - 1, -1, -1))
                sending.send("equal")
            except BaseException as error:
                sending.send(repr(error))

        receiving, sending = mp.Pipe(duplex=False)
        child = mp.get_context("fork").Process(target=read_all, args=(sending,))
        child.start()
        self.check(case, source.read(Span(0, case.n_items)), range(case.n_items))
        assert receiving.poll(20)
        assert receiving.recv() == "equal"
        child.join()

    def test_noncontiguous_room_is_filled_all_the_same(self, case: Case, source: Source) -> None:
        fixed = {name: field for name, field in source.fields.items() if field.item_bytes is not None}
        if not fixed:
            pytest.skip("no field of fixed shape")
        room = {name: np.zeros((6, *field.shape), field.dtype) for name, field in fixed.items()}
        out = {name: array[::2] for name, array in room.items()}
        block = source.take(np.array([4, 0, 4]), out)
        assert all(block[name] is out[name] for name in out)
        self.check(case, block, [4, 0, 4])
        for array in room.values():
            assert array[1::2].tobytes() == np.zeros_like(array[1::2]).tobytes()


@pytest.mark.parametrize("name", ["uniform", "ragged", "gz", "foreign geometries"])
def test_a_process_that_is_spawned_reads_the_same(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    source = case.make()
    items = np.array([case.n_items - 1, 0, 5, 5])
    SourceSuite.check(case, source.take(items), items.tolist())
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        SourceSuite.check(case, pool.submit(source.take, items).result(60), items.tolist())
    source.close()


# -- what the constructor takes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 items of x, y and metadata, in shards of 5."""
    path = tmp_path_factory.mktemp("data") / "set"
    write(path, uniform(0), shard_size=5)
    return path


def test_fields_come_in_the_order_that_they_are_asked_for(folder: Path) -> None:
    for names in (["y", "x"], ["metadata", "y"], ["x"]):
        source = TarSource(folder, fields=names)
        assert list(source.fields) == list(source.take(np.array([3, 1]))) == names
    assert list(TarSource(folder).fields) == ["x", "y", "metadata"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fields": ["z"]}, SourceError, r"no field 'z'; the data set has \['x', 'y', 'metadata'\]"),
        ({"fields": "x"}, OptionError, "fields='x'; give a list"),
        ({"fields": []}, OptionError, r"fields=\[\]; give a list"),
        ({"verify": "sometimes"}, OptionError, "verify='sometimes'; use one of first, always, never"),
        ({"on_error": "ignore"}, OptionError, "on_error='ignore'; use one of raise, substitute"),
        ({"chunk_items": 0}, OptionError, "chunk_items=0"),
        ({"chunk_items": 2.5}, OptionError, r"chunk_items=2\.5"),
        ({"on_error": "substitute", "max_bad_items": -1}, OptionError, "max_bad_items=-1"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_what_can(
    folder: Path, options: Sample, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TarSource(folder, **options)


def test_a_folder_without_shards_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No shards found: there is no folder"):
        TarSource(tmp_path / "nowhere" / "set.json")
    with pytest.raises(SourceError, match="No shards found"):
        TarSource(tmp_path)


def test_archives_without_an_index_say_how_to_get_one(tmp_path: Path) -> None:
    archive(tmp_path / "a.tar", [{"x.npy": npy(np.int64(1))}])
    with pytest.raises(SourceError, match="penstock index"):
        TarSource(tmp_path)


def test_the_repr_names_the_folder_the_items_and_the_fields(folder: Path) -> None:
    assert repr(TarSource(folder)) == f"TarSource({str(folder)!r}, 23 items of x, y, metadata)"


def test_shard_of_says_where_an_item_lies(folder: Path) -> None:
    source = TarSource(folder)
    assert [source.shard_of(item) for item in (0, 4, 5, 22)] == [(0, 0), (0, 4), (1, 0), (4, 2)]


@pytest.mark.parametrize("chunk_items", [1, 2, 3, 5, 99])
def test_chunks_cut_shards_evenly_and_never_cross_one(folder: Path, chunk_items: int) -> None:
    index = TarSource(folder, chunk_items=chunk_items).index
    sizes = index.chunk_sizes(np.arange(index.n_chunks)).tolist()
    borders = set(np.cumsum(sizes).tolist())
    assert max(sizes) <= chunk_items
    assert {5, 10, 15, 20, 23} <= borders
    pieces = -(-5 // chunk_items)
    assert len(sizes) == 4 * pieces + -(-3 // chunk_items)
    whole = sizes[:pieces]
    assert max(whole) - min(whole) <= 1
    assert sizes[: 4 * pieces] == whole * 4


def test_without_a_chunk_size_chunks_are_shards(folder: Path) -> None:
    index = TarSource(folder).index
    assert index.chunk_sizes(np.arange(index.n_chunks)).tolist() == [5, 5, 5, 5, 3]


def test_compressed_shards_are_never_cut(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=5, compression="gz")
    index = TarSource(tmp_path / "set", chunk_items=2).index
    assert index.chunk_sizes(np.arange(index.n_chunks)).tolist() == [5, 5, 5, 5, 3]


def test_the_cut_is_part_of_the_identity_and_the_place_is_not(folder: Path, tmp_path: Path) -> None:
    assert TarSource(folder, chunk_items=2).index.digest != TarSource(folder).index.digest
    write(tmp_path / "elsewhere", uniform(0), shard_size=5)
    assert TarSource(tmp_path / "elsewhere").index.digest == TarSource(folder).index.digest


def test_a_data_set_that_was_moved_is_the_same(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=5)
    source = TarSource(tmp_path / "set")
    before = source.take(np.arange(23))
    source.close()
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = TarSource(tmp_path / "moved")
    assert moved.index.digest == source.index.digest
    assert moved.take(np.arange(23))["y"].tobytes() == before["y"].tobytes()


def test_a_relative_path_means_what_it_meant_when_the_source_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "set", uniform(0), shard_size=5)
    monkeypatch.chdir(tmp_path)
    source = TarSource("set")
    source.take(np.array([0]))
    monkeypatch.chdir("/")
    assert source.take(np.array([22]))["x"].tolist() == [22]
    source.close()
    assert source.take(np.array([1]))["x"].tolist() == [1]


def test_a_pattern_names_the_archives_it_was_indexed_with(tmp_path: Path) -> None:
    for number in range(3):
        archive(tmp_path / f"train-{number:03d}.tar", [{"cls": b"%d" % (number * 2 + k)} for k in range(2)], number * 2)
    for pattern, items in ((tmp_path / "train-{000..001}.tar", 4), (tmp_path / "train-{001,002}.tar", 4)):
        indexed(pattern)
        source = TarSource(pattern)
        assert len(source.index) == items
    assert source.take(np.arange(4))["cls"].tolist() == [2, 3, 4, 5]


# -- only the bytes that are needed ------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def member_places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the payload of each member lies."""
    with tarfile.open(path) as tar:
        return {member.name: (member.offset_data, member.size) for member in tar}


def test_a_field_that_is_not_asked_for_is_not_touched(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23)
    (shard,) = (tmp_path / "set").glob("*.tar")
    for name, (offset, size) in member_places(shard).items():
        if ".y." in name or "metadata" in name:
            for at in (offset - 512, offset + size - 1):  # header and data
                flip(shard, at)
    source = TarSource(tmp_path / "set", fields=["x"], verify="always")
    assert source.take(np.arange(23))["x"].tolist() == list(range(23))
    with pytest.raises(DamageError, match=r"item 4 in shard_000000\.tar"):
        TarSource(tmp_path / "set", fields=["x", "y"]).take(np.array([4]))
    with pytest.raises(DamageError, match=r"item 4 in shard_000000\.tar"):
        TarSource(tmp_path / "set", fields=["metadata"]).take(np.array([4]))


def pages_in_memory(path: Path) -> set[int]:
    """Return which pages of a file the system has in memory."""
    n_pages = -(-path.stat().st_size // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * n_pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        found = ctypes.CDLL(None).mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(whole)), there)
        del whole
    assert found == 0
    return {number for number, page in enumerate(there) if page & 1}


def forget_pages(path: Path) -> None:
    """Let the system forget what it has in memory of a file that was written out."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("field", ["small", "big"])
def test_reading_some_fields_reads_their_pages_only(tmp_path: Path, field: str) -> None:
    samples = [{"small": np.int64(i), "big": np.full(50_000, i, np.float32)} for i in range(20)]
    write(tmp_path / "set", samples, shard_size=20)
    (shard,) = (tmp_path / "set").glob("*.tar")
    source = TarSource(tmp_path / "set", fields=[field])
    forget_pages(shard)
    if pages_in_memory(shard):
        pytest.skip("this file system keeps its files in memory")
    asked = [3, 11]
    assert source.take(np.array(asked))[field].reshape(2, -1)[:, 0].tolist() == asked
    found = pages_in_memory(shard)
    places = member_places(shard)
    wanted = set()
    for item in asked:
        offset, size = places[f"sample_{item:09d}.{field}.npy"]
        wanted |= set(range((offset - 512) // mmap.PAGESIZE, -(-(offset + -(-size // 512) * 512) // mmap.PAGESIZE)))
    assert wanted <= found
    assert len(found) <= 2 * len(wanted) + 16  # of a thousand; a system may read a little around what it is asked for


@pytest.mark.parametrize("verify", ["first", "always"])
def test_damage_to_an_item_that_was_verified_before_is_noticed(tmp_path: Path, verify: Any) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23)
    (shard,) = (tmp_path / "set").glob("*.tar")
    source = TarSource(tmp_path / "set", fields=["y"], verify=verify)
    assert same(source.take(np.array([7]))["y"][0], grid(7))
    offset, size = member_places(shard)["sample_000000007.y.npy"]
    flip(shard, offset + size - 1)
    for _ in range(2):
        with pytest.raises(DamageError, match=r"item 7 in shard_000000\.tar"):
            source.take(np.array([7]))
    assert same(source.take(np.array([8]))["y"][0], grid(8))
    flip(shard, offset + size - 1)
    assert same(source.take(np.array([7]))["y"][0], grid(7))  # mended
    source.close()


def test_without_verification_bytes_are_delivered_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23)
    (shard,) = (tmp_path / "set").glob("*.tar")
    offset, size = member_places(shard)["sample_000000007.y.npy"]
    flip(shard, offset + size - 1)
    found = TarSource(tmp_path / "set", fields=["y"], verify="never").take(np.array([6, 7]))["y"]
    assert same(found[0], grid(6))
    assert found[1].tobytes()[:-1] == grid(7).tobytes()[:-1]
    assert not same(found[1], grid(7))


# -- many shards, many threads, open and close -------------------------------------------------------------------------

FEW_FILES = """
import json, resource, sys, threading
import numpy as np
from penstock import TarSource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
source, failures = TarSource(sys.argv[1]), []

def read(seed):
    rng = np.random.default_rng(seed)
    try:
        for turn in range(6):
            items = rng.permutation(60)
            block = source.take(items)
            assert block["x"].tolist() == items.tolist()
            assert [about["sample_id"] for about in block["metadata"]] == [f"sample_{i:09d}" for i in items]
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=read, args=(seed,)) for seed in range(int(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(failures))
"""


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_more_shards_than_files_may_be_open_are_read_in_turns(tmp_path: Path, compression: str, threads: int) -> None:
    samples = [{"x": np.int64(i), "y": np.full(3, i, np.float32)} for i in range(60)]
    write(tmp_path / "set", samples, shard_size=1, compression=compression)
    with script(tmp_path, FEW_FILES, str(tmp_path / "set"), str(threads)) as process:
        assert answer(process) == []


NO_FILES = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from penstock import DamageError, PenstockError, TarSource

folder = Path(sys.argv[1])
source = TarSource(folder, on_error=sys.argv[2])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
try:
    found = source.take(np.arange(8))["x"].tolist()
except Exception as error:
    found = [isinstance(error, OSError), isinstance(error, PenstockError), isinstance(error, DamageError)]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(json.dumps([found, (folder / "quarantine.jsonl").exists(), source.take(np.arange(8))["x"].tolist()]))
"""


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_an_item_is_not_bad_because_this_process_has_no_file_left_to_open(
    tmp_path: Path, compression: str, on_error: str
) -> None:
    write(tmp_path / "set", uniform(0, 8), shard_size=2, compression=compression)
    with script(tmp_path, NO_FILES, str(tmp_path / "set"), on_error) as process:
        found, quarantined, after = answer(process)
    assert found == [True, True, False], "a ReadError, and no damage"
    assert not quarantined
    assert after == list(range(8))


def test_closing_lets_go_of_every_file(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), compression="gz")
    source, before = TarSource(tmp_path / "set"), open_files()
    source.take(np.arange(23))
    assert open_files() != before
    source.close()
    assert eventually(lambda: open_files() == before)


def test_a_source_that_is_dropped_lets_go_of_every_file(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), compression="gz")
    before = open_files()
    source = TarSource(tmp_path / "set")
    source.take(np.arange(23))
    del source
    assert eventually(lambda: open_files() == before)


def test_threads_read_many_shards_while_the_source_is_closed_again_and_again(
    cases: Callable[[str], Case],
) -> None:
    case = cases("foreign geometries")  # five shards, each of a layout of its own
    source, failures, done = case.make(), [], threading.Event()
    turns = 60

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(turns):
                items = rng.integers(0, case.n_items, 8)
                SourceSuite.check(case, source.take(items), items.tolist())
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while not done.is_set():
        source.close()
    for thread in threads:
        thread.join()
    source.close()
    if failures:
        raise failures[0]


def test_threads_that_all_open_one_shard_get_the_same(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23, compression="xz")
    for _ in range(10):
        source, found, start = TarSource(tmp_path / "set", fields=["x"]), [], threading.Barrier(4)

        def read(source: TarSource = source, found: list[Any] = found, start: threading.Barrier = start) -> None:
            start.wait(10)
            found.append(source.take(np.arange(23))["x"].tolist())

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [list(range(23))] * 4
        source.close()


# -- against a model ---------------------------------------------------------------------------------------------------

_DTYPES = ["i8", "f4", "u1", "?", "c16", "M8[s]", "S3", "U2"]


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[list[Sample], Sample, Sample]:
    """Return samples, how they are written and how they are read."""
    n_items = draw(st.integers(1, 14))
    fields: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple))
        fields[f"f{number}"] = draw(st.sampled_from(_DTYPES)), shape
    samples = []
    for item in range(n_items):
        sample: Sample = {}
        for number, (name, (dtype, shape)) in enumerate(fields.items()):
            actual = shape if shape is not None else (draw(st.integers(0, 4)), 2)
            count = int(np.prod(actual, dtype=int))
            values = (np.arange(count) + 10 * item + number).astype("i8").astype(dtype)
            sample[name] = values.reshape(actual)
        samples.append(sample)
    writing = {
        "shard_size": draw(st.integers(1, 6)),
        "compression": draw(st.sampled_from(["none", "none", "gz"])),
        "array_format": draw(st.sampled_from(["npy", "npy", "pyd"])),
    }
    reading = {
        "verify": draw(st.sampled_from(["first", "always", "never"])),
        "chunk_items": draw(st.none() | st.integers(1, 5)),
        "fields": draw(st.none() | st.lists(st.sampled_from([*fields, "metadata"]), min_size=1, unique=True)),
    }
    return samples, writing, reading


@given(data_sets(), st.data())
def test_any_data_set_reads_like_the_list_it_was_written_from(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[Sample], Sample, Sample], data: st.DataObject
) -> None:
    samples, writing, reading = case
    folder = tmp_path_factory.mktemp("model") / "set"
    truth = write(folder, samples, **writing)
    source = TarSource(folder, **reading)
    for _ in range(3):
        items = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=9))
        fixed = {name: field for name, field in source.fields.items() if field.item_bytes is not None}
        out = None
        if data.draw(st.booleans()) and fixed:
            out = {name: np.ones((len(items), *field.shape), field.dtype) for name, field in fixed.items()}
        ascending = items == list(range(items[0], items[0] + len(items))) if items else False
        block = (
            source.read(Span(items[0], items[-1] + 1), out)
            if ascending
            else source.take(np.array(items, np.int64), out)
        )
        assert list(block) == list(source.fields)
        for name, array in block.items():
            assert out is None or name not in out or array is out[name]
            assert len(array) == len(items)
            for row, item in enumerate(items):
                # Not array[row]: a string of no axes would come without its width.
                value = array[row] if array.dtype.hasobject else array[row : row + 1].reshape(array.shape[1:])
                assert same(value, truth(item)[name])
        if data.draw(st.booleans()):
            source.close()
    source.close()


# -- sources made of sources -------------------------------------------------------------------------------------------


def test_a_concat_whose_parts_differ_in_what_is_fixed_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "fixed", uniform(0, 4))
    write(tmp_path / "ragged", [{"x": np.int64(i), "y": np.zeros((i, 3), np.float32)} for i in range(4)])
    with pytest.raises(SourceError, match="has fields"):
        Concat([TarSource(tmp_path / "fixed"), TarSource(tmp_path / "ragged")])


def test_a_concat_fills_the_room_of_fixed_fields_across_its_parts(tmp_path: Path) -> None:
    truths = [
        write(tmp_path / str(k), uniform(100 * k, 6), [{"note": "n" * 300 * i} for i in range(6)]) for k in range(3)
    ]
    both = Concat([TarSource(tmp_path / str(k)) for k in range(3)])
    items = np.array([17, 0, 6, 6, 11, 5])
    out = {"x": np.zeros(6, np.int64), "y": np.zeros((6, 2, 3), np.float32)}
    block = both.take(items, out)
    assert block["x"] is out["x"]
    assert block["y"] is out["y"]
    for row, item in enumerate(items.tolist()):
        wanted = truths[item // 6](item % 6)
        assert all(same(block[name][row], wanted[name]) for name in ("x", "y", "metadata"))


def test_selecting_by_mask_keeps_the_chunks_of_the_shards(folder: Path) -> None:
    source = TarSource(folder)
    part = Take(source, np.arange(23) % 2 == 0)
    assert part.index.chunk_sizes(np.arange(part.index.n_chunks)).tolist() == [3, 2, 3, 2, 2]
    assert part.read(Span(0, 12))["x"].tolist() == list(range(0, 23, 2))
    assert isinstance(part.index, Index)


def test_the_metadata_of_a_sample_is_its_own_json(folder: Path) -> None:
    (shard, *_) = sorted(folder.glob("*.tar"))
    offset, size = member_places(shard)["sample_000000003.metadata.json"]
    stored = json.loads(shard.read_bytes()[offset : offset + size])
    assert TarSource(folder, fields=["metadata"]).take(np.array([3]))["metadata"][0] == stored


def test_reading_past_the_end_names_the_items_and_the_data_set(folder: Path) -> None:
    with pytest.raises(ReadError, match=rf"items 20–29 of TarSource\({str(folder)!r}.*it has items 0–22"):
        TarSource(folder).read(Span(20, 30))
