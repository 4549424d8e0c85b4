"""Items in shards of every layout that the writer can produce are read as they were written, in any order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, ShortSuite, same
from penstock_test_shards import (
    Kind,
    Sample,
    TarSuite,
    Truth,
    check_in_a_spawned_process,
    grid,
    in_columns,
    npy,
    uniform,
    write,
)

from penstock import Span, TarSource

# -- layouts: item i of a data set that was made with `offset` holds i + offset ----------------------------------------


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


def _ragged_large(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    # Around what is read together, alone, or with its neighbours.
    lengths = [1, 70_000, 30_000, 0, 65_536 - 32, 65_536 - 31, 5, 200_000, 40_000]
    samples = [{"v": np.arange(length, dtype=np.float32) + i + offset} for i, length in enumerate(lengths)]
    return write(folder, samples), 9, {}


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


def _compressed(kind: str, **options: Any) -> Kind:
    def make(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
        about = [{"note": "n" * ((i * 7919) % 1700)} for i in range(23)]
        return write(folder, uniform(offset), about, compression=kind), 23, options

    return make


def _options(**options: Any) -> Kind:
    return lambda folder, offset: (write(folder, uniform(offset)), 23, options)


KINDS: dict[str, Kind] = {
    "uniform": _uniform,
    "arrays only": _arrays_only,
    "one field": _one_field,
    "large fields": _large,
    "ragged": _ragged,
    "ragged and large": _ragged_large,
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
}
SAMPLES_ONLY = ("pyd", "one field", "large fields", "nothing but items of no size", "bz2", "xz")
KINDS |= {f"columns: {name}": in_columns(kind) for name, kind in KINDS.items() if name not in SAMPLES_ONLY}
KINDS |= {f"mixed: {name}": in_columns(KINDS[name], mixed=True) for name in ("uniform", "ragged", "objects", "dtypes")}
FULLY = ("uniform", "ragged", "columns: uniform", "mixed: ragged")  # tested in full
cases = penstock_test_shards.cases


class TestTarSource(TarSuite):
    @pytest.fixture(params=FULLY)
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
        return cases(request.param)


class TestOtherKinds(ShortSuite):
    suite = TarSuite

    @pytest.fixture(params=[name for name in KINDS if name not in FULLY])
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
        return cases(request.param)


@pytest.mark.parametrize(
    "name", [pytest.param("uniform", marks=pytest.mark.canary("spawn")), "ragged", "gz", "mixed: uniform"]
)
def test_a_process_that_is_spawned_reads_the_same(cases: Callable[[str], Case], name: str) -> None:
    check_in_a_spawned_process(cases(name))


@pytest.mark.parametrize("name", ["ragged", "ragged and large", "columns: ragged", "columns: ragged and large"])
def test_arrays_of_any_length_can_be_written_to_and_share_no_memory(cases: Callable[[str], Case], name: str) -> None:
    source = cases(name).make()
    arrays = list(source.take(np.arange(len(source.index)))["v" if "large" in name else "events"])
    assert all(array.flags.writeable and array.flags.aligned and array.flags.c_contiguous for array in arrays)
    before = [array.copy() for array in arrays]
    for number, array in enumerate(arrays):
        array[...] = -1
        for other in range(number + 1, len(arrays)):
            assert arrays[other].tolist() == before[other].tolist()


# -- against a model ---------------------------------------------------------------------------------------------------

_DTYPES = ["i8", "f4", "u1", "?", "c16", "M8[s]", "S3", "U2"]


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[list[Sample], Sample, Sample]:
    """Return samples, options of the writer and options of the source."""
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
        "layout": draw(st.sampled_from(["samples", "columns"])),
    }
    if writing["layout"] == "columns":
        writing["array_format"] = "npy"
    reading = {
        "verify": draw(st.sampled_from(["first", "always", "never"])),
        "chunk_items": draw(st.none() | st.integers(1, 5)),
        "fields": draw(st.none() | st.lists(st.sampled_from([*fields, "metadata"]), min_size=1, unique=True)),
    }
    return samples, writing, reading


@given(data_sets(), st.data())
def test_any_dataset_reads_like_the_list_it_was_written_from(
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
