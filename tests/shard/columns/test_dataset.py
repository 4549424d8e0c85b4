"""Datasets in the layout "columns": the same samples, written, resumed, indexed and verified as in the other layout."""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from penstock_cases import few_cases
from penstock_source_suite import same

from penstock import create_shards_from_arrays
from penstock.convert.convert import convert
from penstock.convert.inputs.source import ShardsInput
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import OptionError
from penstock.recipes.webdataset import ShardedDatasetInfo, WebDatasetWriter
from penstock.shard.columns import packed_shard
from penstock.shard.index_tars import index_archives
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import SMALL_ITEM, WriteOptions
from penstock.shard.summary import summarize
from penstock.shard.verify import verify_sample, verify_shards
from penstock.shard.writer import ShardWriter
from tests.shard.columns.unpack import unpack_dataset
from tests.shard.samples import contents, start_writer, write


def make(number: int) -> dict[str, Any]:
    """Return a sample with a field of every kind; every value encodes its number."""
    return {
        "x": np.full((2, 3), number, np.int32),
        "label": number,
        "events": np.arange(number % 4) * number,
        "note": f"n{number}",
        "tags": [number, None],
        "png": bytes([number]) * number,
        "wild": np.full((number % 2 + 1, number % 3), number),
    }


def about(number: int) -> dict[str, Any]:
    """Return metadata of every kind."""
    own = {"other": [number]} if number % 2 else {}
    return {"number": number, "rate": number / 7, "ok": bool(number % 3), "name": f"ä{number}", **own}


def write_columns(folder: Path, n_samples: int = 11, *, resume: bool = False, **options: Any) -> Manifest:
    writing = WriteOptions(**{"shard_size": 4, "layout": "columns", **options})
    writer = ShardWriter(folder, writing, resume=resume, overwrite=not resume)
    for number in range(writer.written, n_samples):
        writer.write(make(number), f"id/{number}" if number == 5 else None, about(number))
    return writer.commit()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks end after three rows."""
    monkeypatch.setattr(packed_shard, "BLOCK_ROWS", 3)


@pytest.mark.usefixtures("small_blocks")
def test_all_samples_are_there_with_their_metadata(tmp_path: Path) -> None:
    manifest = write_columns(tmp_path)
    items = unpack_dataset(tmp_path)
    assert len(items) == manifest.n_items == 11
    for number, item in enumerate(items):
        found = item.pop("metadata")
        assert found == {
            "sample_id": "id/5" if number == 5 else f"sample_{number:09d}",
            "modalities": list(make(number)),
            "shard_idx": number // 4,
            "sample_idx_in_shard": number % 4,
            **about(number),
        }
        wanted = make(number)
        assert list(item) == list(wanted)
        for name, value in wanted.items():
            assert same(item[name], value if isinstance(value, str | list | bytes) else np.asarray(value)), name
    assert verify_shards(tmp_path)[1] == []
    assert verify_sample(manifest, max_bytes=10**6, max_seconds=60).problems == ()


def test_the_manifest_says_the_layout_where_it_is_not_the_usual_one(tmp_path: Path) -> None:
    write_columns(tmp_path / "columns")
    stored = json.loads((tmp_path / "columns" / "dataset_metadata.json").read_bytes())
    assert stored["layout"] == summarize(Manifest.read(tmp_path / "columns" / "dataset_metadata.json"))["layout"]
    write(tmp_path / "samples")
    stored_so_far = json.loads((tmp_path / "samples" / "dataset_metadata.json").read_bytes())
    assert stored["layout"] == "columns"
    assert "layout" not in stored_so_far
    write_columns(tmp_path / "samples of all kinds", layout="samples")
    one, other = (
        json.loads((tmp_path / name / "dataset_metadata.json").read_bytes())
        for name in ("columns", "samples of all kinds")
    )
    assert one["fields"] == other["fields"]


def test_members_are_arrays_of_numpy(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "set", {"x": np.arange(12).reshape(6, 2)}, layout="columns")
    subprocess.run(["tar", "xf", tmp_path / "set" / "shard_000000.tar", "-C", tmp_path], check=True)
    assert np.load(tmp_path / "block_000000.x.npy").tolist() == np.arange(12).reshape(6, 2).tolist()


@pytest.mark.parametrize("compression", ["none", "xz"])
@pytest.mark.parametrize("stopped", [0, 3, 4, 7, 8, 11])
@pytest.mark.usefixtures("small_blocks")
def test_resuming_ends_in_the_same_bytes(stopped: int, compression: Any, tmp_path: Path) -> None:
    write_columns(tmp_path / "whole", compression=compression)
    writer = ShardWriter(tmp_path / "set", WriteOptions(4, layout="columns", compression=compression))
    for number in range(stopped):
        writer.write(make(number), f"id/{number}" if number == 5 else None, about(number))
    writer.abandon()
    write_columns(tmp_path / "set", resume=True, compression=compression)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_blocks")
def test_samples_from_the_beginning_are_compared(tmp_path: Path) -> None:
    write_columns(tmp_path / "whole")
    writer = ShardWriter(tmp_path / "set", WriteOptions(4, layout="columns"))
    for number in range(9):
        writer.write(make(number), f"id/{number}" if number == 5 else None, about(number))
    writer.abandon()
    again = ShardWriter(tmp_path / "set", WriteOptions(4, layout="columns"), resume=True)
    for number in range(11):
        again.write(make(number), f"id/{number}" if number == 5 else None, about(number))
    again.commit()
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


_CHANGES: dict[str, Any] = {
    "value": lambda one, more: ({**one, "label": -1}, None, more),
    "shape": lambda one, more: ({**one, "events": np.arange(3)}, None, more),
    "text": lambda one, more: ({**one, "note": "another"}, None, more),
    "id": lambda one, more: (one, "another", more),
    "number": lambda one, more: (one, None, {**more, "number": -1}),
    "type": lambda one, more: (one, None, {**more, "number": 2.0}),
    "lacks": lambda one, more: (one, None, {name: value for name, value in more.items() if name != "rate"}),
    "adds": lambda one, more: (one, None, {**more, "added": 1}),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_other_samples_than_the_stored_ones_are_refused(change: str, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WriteOptions(4, layout="columns"))
    for number in range(0, 10, 2):
        writer.write(make(number), None, about(number))
    writer.abandon()
    again = ShardWriter(tmp_path, WriteOptions(4, layout="columns"), resume=True)
    again.write(make(0), None, about(0))
    with pytest.raises(OptionError, match="given as number 1 differs"):
        again.write(*_CHANGES[change](make(2), about(2)))
    again.abandon()


def test_another_layout_cannot_resume(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    writer.write(make(0), None, None)
    writer.abandon()
    with pytest.raises(OptionError, match="needs the options with which"):
        ShardWriter(tmp_path, WriteOptions(3, layout="columns"), resume=True)
    write_columns(tmp_path)
    with pytest.raises(OptionError, match="needs the options of the complete dataset"):
        ShardWriter(tmp_path, WriteOptions(4), resume=True)
    ShardWriter(tmp_path, WriteOptions(4, layout="auto"), resume=True).abandon()


@pytest.mark.parametrize(("n_items", "width"), [(500, 30), (20, 900)], ids=["small", "large"])
def test_arrays_are_written_in_blocks(n_items: int, width: int, tmp_path: Path) -> None:
    """Blocks of rows give the same bytes as samples, also after an interruption."""
    rng, size = np.random.default_rng(0), 2 * n_items // 5
    arrays = {"x": rng.random((n_items, 40, width), np.float32), "y": np.arange(n_items)}
    with WebDatasetWriter(tmp_path / "samples", size, layout="columns") as writer:
        for number in range(n_items):
            writer.write_sample({name: array[number] for name, array in arrays.items()})
    create_shards_from_arrays(tmp_path / "arrays", arrays, size, layout="columns", show_progress=False)
    stopped = ShardWriter(tmp_path / "resumed", WriteOptions(size, layout="columns"))
    stopped.write_rows(arrays, 0, n_items // 2)
    stopped.abandon()
    create_shards_from_arrays(tmp_path / "resumed", arrays, size, layout="columns", resume=True, show_progress=False)
    assert contents(tmp_path / "samples") == contents(tmp_path / "arrays") == contents(tmp_path / "resumed")


def test_small_items_take_little_more_than_their_payload(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((4000, 16, 16), np.float32), "label": np.arange(4000)}
    create_shards_from_arrays(tmp_path, arrays, 4000, layout="columns", show_progress=False)
    stored = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert stored <= 1.05 * sum(array.nbytes for array in arrays.values())


def test_auto_takes_columns_for_small_items(tmp_path: Path) -> None:
    for layout, n_bytes in (("columns", SMALL_ITEM // 2), ("samples", 2 * SMALL_ITEM)):
        arrays = {"x": np.zeros((2, n_bytes), np.uint8)}
        create_shards_from_arrays(tmp_path / layout, arrays, layout="auto", show_progress=False)
        assert Manifest.read(tmp_path / layout / "dataset_metadata.json").layout == layout


def test_shards_have_at_most_the_bytes_that_are_allowed(tmp_path: Path) -> None:
    manifest = write_columns(tmp_path, max_shard_bytes=40_000, shard_size=1000)
    assert len(manifest.shards) > 1
    assert all(shard.tar_bytes <= 40_000 for shard in manifest.shards)
    writer = ShardWriter(tmp_path / "small", WriteOptions(max_shard_bytes=4096, layout="columns"))
    with pytest.raises(OptionError, match="A sample must fit into a shard of 4096 bytes"):
        writer.write(make(0), None, None)
    writer.write({"x": 1}, None, None)
    assert writer.commit().n_items == 1


def test_pickled_arrays_have_no_columns() -> None:
    with pytest.raises(OptionError, match=r"layout='columns' stores arrays as \.npy"):
        WriteOptions(layout="columns", array_format="pyd")


@pytest.mark.usefixtures("small_blocks")
def test_a_damaged_row_is_named_and_its_neighbours_are_right(tmp_path: Path) -> None:
    write_columns(tmp_path)
    path = tmp_path / "shard_000001.tar"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"n4n5n6", b"n4n!n6"))
    problems = verify_shards(tmp_path)[1]
    assert [(problem.shard, problem.item) for problem in problems] == [(path.name, 5)]
    assert "'note.txt.npy'" in problems[0].reason
    path.write_bytes(content[:-2000])
    assert len(verify_shards(tmp_path)[1]) == 2


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.usefixtures("small_blocks")
def test_a_side_index_is_made_anew_from_the_members(tmp_path: Path, compression: Any) -> None:
    write_columns(tmp_path, compression=compression)
    before = contents(tmp_path)
    (tmp_path / "dataset_metadata.json").unlink()
    for path in tmp_path.glob("*.index"):
        path.unlink()
    manifest, problems = index_archives(tmp_path)
    assert problems == []
    assert manifest is not None
    assert manifest.layout == "columns"
    after = contents(tmp_path)
    indexes = {name for name in before if name.endswith(".index")}
    assert {name: after[name] for name in indexes} == {name: before[name] for name in indexes}
    assert (
        json.loads(after["dataset_metadata.json"])["fingerprint"]
        == json.loads(before["dataset_metadata.json"])["fingerprint"]
    )


def test_a_tar_of_samples_may_begin_with_a_block(tmp_path: Path) -> None:
    """Only what the writer makes is a packed shard."""
    payload = io.BytesIO()
    np.save(payload, np.arange(3))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("block_000000.jpg", "block_000001.jpg"):
            archive.addfile(tarfile.TarInfo(name))
    manifest, problems = index_archives(tmp_path)
    assert problems == []
    assert manifest is not None
    assert manifest.n_items == 2


def test_a_damaged_packed_archive_is_not_indexed(tmp_path: Path) -> None:
    write_columns(tmp_path)
    (tmp_path / "dataset_metadata.json").unlink()
    path = tmp_path / "shard_000001.tar"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"block_000000.__offsets.note", b"block_000000.__offsets.nope"))
    manifest, problems = index_archives(tmp_path)
    assert manifest is None
    assert {problem.shard for problem in problems} == {path.name}


_DTYPES = st.one_of(
    nps.boolean_dtypes(),
    nps.integer_dtypes(endianness="?"),
    nps.floating_dtypes(endianness="?"),
    nps.complex_number_dtypes(),
    nps.datetime64_dtypes(max_period="s"),
    nps.byte_string_dtypes(max_len=3),
    nps.unicode_string_dtypes(max_len=3),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def _samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    dtype, n_samples = draw(_DTYPES), draw(st.integers(1, 9))
    n_axes, trailing = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    samples = []
    for _ in range(n_samples):
        lengths = draw(st.tuples(*[st.integers(0, 3)] * n_axes)) + (2,) * trailing
        samples.append(
            {
                "array": draw(nps.arrays(dtype, lengths)),
                "text": draw(st.text(max_size=5)),
                "raw": draw(st.binary(max_size=5)),
                "value": draw(_JSON.map(lambda value: [value])),
            }
        )
    return samples


@given(samples=_samples(), data=st.data())
@few_cases
def test_what_is_written_comes_back(samples: list[dict[str, Any]], data: st.DataObject, tmp_path_factory: Any) -> None:
    tmp_path = tmp_path_factory.mktemp("set")
    names = st.sampled_from(["a", "B", "b", "json", "a b", "a/b", "ü", "", "x" * 50])
    metadata = [data.draw(st.none() | st.dictionaries(names, _JSON, max_size=4)) for _ in samples]
    block_rows = data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_shard, "BLOCK_ROWS", block_rows)
        writer = ShardWriter(tmp_path, WriteOptions(5, layout="columns"), overwrite=True)
        for sample, more in zip(samples, metadata, strict=True):
            writer.write(sample, None, more)
        writer.commit()
    for found, wanted, more in zip(unpack_dataset(tmp_path), samples, metadata, strict=True):
        kept = {name: value for name, value in found.pop("metadata").items() if name in (more or {})}
        assert json.dumps(kept, sort_keys=True) == json.dumps(more or {}, sort_keys=True)
        assert (
            found["array"].dtype == wanted["array"].dtype.newbyteorder("=")
            or found["array"].dtype == wanted["array"].dtype
        )
        assert found["array"].shape == wanted["array"].shape
        assert found["array"].astype(wanted["array"].dtype).tobytes() == wanted["array"].tobytes()
        assert (found["text"], found["raw"], found["value"]) == (wanted["text"], wanted["raw"], wanted["value"])
    assert verify_shards(tmp_path)[1] == []


def test_repacked_twice_shards_have_their_bytes_again(tmp_path: Path) -> None:
    write_columns(tmp_path / "samples", layout="samples")
    for before, after in (("samples", "columns"), ("columns", "again")):
        layout: Any = "columns" if after == "columns" else "samples"
        convert([ShardsInput(tmp_path / before)], tmp_path / after, ConvertOptions(WriteOptions(4, layout=layout)))
    tars = sorted(path.name for path in (tmp_path / "samples").glob("*.tar"))
    assert len(tars) == 3
    for name in tars:
        assert (tmp_path / "samples" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    out = io.StringIO()
    ShardedDatasetInfo(tmp_path / "columns").print_summary(out)
    assert "Layout       columns\n" in out.getvalue()


def test_shards_of_samples_are_repacked(tmp_path: Path) -> None:
    write_columns(tmp_path / "samples", layout="samples")
    manifest = convert(
        [ShardsInput(tmp_path / "samples")], tmp_path / "columns", ConvertOptions(WriteOptions(4, layout="columns"))
    )[""]
    assert manifest.layout == "columns"
    write_columns(tmp_path / "direct")
    for found, wanted in zip(unpack_dataset(tmp_path / "columns"), unpack_dataset(tmp_path / "direct"), strict=True):
        assert found.keys() == wanted.keys()
        assert {**found.pop("metadata"), "sample_id": ""} == {**wanted.pop("metadata"), "sample_id": ""}
        for name, value in wanted.items():
            assert same(found[name], value), name
