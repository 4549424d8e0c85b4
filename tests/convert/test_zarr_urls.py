"""Zarr stores at a URL: the shards of a local store, one request for each chunk, and what is wrong with a store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_convert_parts import tree
from penstock_remote import Endpoint

from penstock import TarSource, convert_to_shards
from penstock.convert import ConvertOptions, ReadOptions
from penstock.convert.fingerprint import digest_input, stamp_input
from penstock.convert.inputs.zarr import ZarrInput
from penstock.core.errors import ConversionError, PenstockError, SourceError
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.options import StoreOptions
from penstock.shard.outputs.write_options import WriteOptions

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning", "ignore:.*specification:FutureWarning")

X = np.arange(40 * 6, dtype=np.float32).reshape(40, 6)
LABEL = np.array([f"row {number}" for number in range(40)], "U8")
KINDS: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2, "chunks": (7, 4)},
    "v3": {"zarr_format": 3, "chunks": (7, 4)},
    "v3 sharded": {"zarr_format": 3, "chunks": (5, 3), "shards": (20, 6)},
    "v3 not native": {"zarr_format": 3, "chunks": (7, 4), "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
}


def store_array(folder: Path, name: str = "a.zarr", **options: Any) -> Path:
    zarr.create_array(folder / name, shape=X.shape, dtype=X.dtype, **{**KINDS["v3"], **options})[...] = X
    return folder / name


def store_group(folder: Path, kind: str = "v3") -> Path:
    group = zarr.create_group(folder / "g.zarr", zarr_format=KINDS[kind]["zarr_format"])
    own = {name: value for name, value in KINDS[kind].items() if name != "zarr_format"}
    group.create_array("x", shape=X.shape, dtype=X.dtype, **own)[...] = X
    group.create_array("label", data=LABEL, chunks=(9,))
    return folder / "g.zarr"


def run(where: Any, output: Any, server: Endpoint | None = None, **more: Any) -> dict[str, Any]:
    store = server.options if server is not None and server.url.scheme == "s3" else None
    options = ConvertOptions(WriteOptions(6))
    reading = more.pop("reading", None)
    return convert_to_shards(where, output, options=options, reading=reading, store=store, show_progress=False, **more)


def shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(folder).items() if ".tar" in name}


def given(server: Endpoint, name: str, **more: Any) -> ZarrInput:
    store = server.options if server.url.scheme == "s3" else None
    return ZarrInput(server.url / name, remote=RemoteOptions(store), **more)


# -- which items -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_array_in_a_bucket_gives_the_shards_of_a_local_one(
    s3: Endpoint, tmp_path: Path, kind: str, workers: int
) -> None:
    path = store_array(s3.folder, **KINDS[kind])
    local = run(path, tmp_path / "local")
    found = run(str(s3.url / "a.zarr/"), tmp_path / "out", s3, workers=workers)
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    assert found["fingerprint"] == local["fingerprint"]


@pytest.mark.parametrize("place", ["s3", "http"])
@pytest.mark.parametrize("axis", [0, 1])
def test_windows_along_an_axis_are_those_of_the_array(
    s3: Endpoint, http_files: Endpoint, tmp_path: Path, place: str, axis: int
) -> None:
    server = s3 if place == "s3" else http_files
    path = store_array(server.folder)
    reading = ReadOptions(sequence_length=3, overlap=0.34, axis=axis)
    run(path, tmp_path / "local", reading=reading)
    run(str(server.url / "a.zarr"), tmp_path / "out", server, reading=reading)
    assert shards(tmp_path / "out") == shards(tmp_path / "local")


@pytest.mark.parametrize("kind", ["v2", "v3 sharded"])
def test_the_arrays_of_a_group_are_fields(s3: Endpoint, tmp_path: Path, kind: str) -> None:
    run(store_group(s3.folder, kind), tmp_path / "local")
    run(str(s3.url / "g.zarr"), tmp_path / "out", s3)
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    run(str(s3.url / "g.zarr"), tmp_path / "x", s3, reading=ReadOptions(fields=("x",)))
    assert TarSource(tmp_path / "x").take(np.array([39]))["x"].tolist() == [X[39].tolist()]


def test_arrays_behind_a_web_server_are_named_or_consolidated(http_files: Endpoint, tmp_path: Path) -> None:
    path = store_group(http_files.folder, "v2")
    where = str(http_files.url / "g.zarr")
    with pytest.raises(ConversionError, match=r"must be named, as in fields=\['x', 'y'\]: its server lists nothing"):
        run(where, tmp_path / "out")
    run(where, tmp_path / "named", reading=ReadOptions(fields=("x",)))
    zarr.consolidate_metadata(path)
    run(where, tmp_path / "out")
    run(path, tmp_path / "local")
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    assert TarSource(tmp_path / "named").take(np.array([7]))["x"].tolist() == [X[7].tolist()]


def store_large(folder: Path) -> Path:
    """Store rows that are chunks, too large to be read together, but small when they are compressed."""
    rows = np.repeat(np.arange(6, dtype=np.float32)[:, None], 1_100_000, axis=1)
    zarr.create_array(folder / "large.zarr", data=rows, chunks=(1, 1_100_000))
    return folder / "large.zarr"


def test_each_chunk_is_read_once_by_a_process(s3: Endpoint, tmp_path: Path) -> None:
    store_large(s3.folder)
    s3.reset_counts()
    run(str(s3.url / "large.zarr"), tmp_path / "out", s3)
    asked = sorted(key for method, key, *_ in s3.log() if method == "GET" and "/c/" in key)
    # The scan reads the first item, and what comes next is asked for ahead.
    assert sorted(set(asked)) == [f"large.zarr/c/{number}/0" for number in range(6)]
    assert len(asked) <= 6 + 2


def test_a_conversion_that_is_interrupted_resumes(s3: Endpoint, tmp_path: Path) -> None:
    path, where = store_large(s3.folder), str(s3.url / "large.zarr")
    options = ConvertOptions(WriteOptions(1))
    convert_to_shards(path, tmp_path / "local", options=options, show_progress=False)
    hasty = StoreOptions(s3.options.endpoint, "us-east-1", credentials=s3.options.credentials, retries=0)
    s3.break_requests({"kind": "status", "status": 500, "method": "GET", "key": "large.zarr/c/4/0"})
    with pytest.raises(ConversionError, match=r"rows 4–4 of the array 'data'.*the server answered 500"):
        convert_to_shards(where, tmp_path / "out", options=options, store=hasty, show_progress=False)
    assert not (tmp_path / "out" / "dataset_metadata.json").exists()
    s3.reset()
    convert_to_shards(where, tmp_path / "out", options=options, store=s3.options, show_progress=False, resume=True)
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    # The chunks of the shards that were finished are not read again; the scan reads the first one.
    assert s3.n_requests("GET", "large.zarr/c/3/0") == 0


# -- what is missing or changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["s3", "http"])
def test_chunks_that_were_never_stored_are_fill_values_and_noted(
    s3: Endpoint, http_files: Endpoint, tmp_path: Path, place: str
) -> None:
    server = s3 if place == "s3" else http_files
    path = store_array(server.folder, fill_value=-1)
    (path / "c/1/0").unlink()
    found = run(str(server.url / "a.zarr"), tmp_path / "out", server)
    run(path, tmp_path / "local")
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    notes = found["metadata"]["conversion"]["inputs"][0]["notes"]
    expected = "1 of 12 chunk files of the array 'data' is not stored; missing chunks read as the fill value, -1.0."
    assert notes == [expected]


def test_a_chunk_that_is_lost_or_replaced_later_is_an_error(s3: Endpoint) -> None:
    for change, message in ((Path.unlink, "was there when the array was opened"), (_damage, "it was replaced")):
        path = store_array(s3.folder, overwrite=True)
        recording = given(s3, "a.zarr").open()
        change(path / "c/5/0")
        with pytest.raises(PenstockError, match=message):
            list(recording.samples(np.array([38])))
        recording.close()


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def test_metadata_of_an_array_that_change_are_noticed(s3: Endpoint) -> None:
    path = store_group(s3.folder)
    before = stamp_input(given(s3, "g.zarr")), digest_input(given(s3, "g.zarr"))
    assert (stamp_input(given(s3, "g.zarr")), digest_input(given(s3, "g.zarr"))) == before
    zarr.open_array(path / "x", mode="r+").resize((39, 6))
    assert stamp_input(given(s3, "g.zarr")) != before[0]
    assert digest_input(given(s3, "g.zarr")) != before[1]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nothing.zarr", None, "No such folder: .*nothing.zarr has no metadata"),
        ("g.zarr", ("y",), r"g.zarr has no y. Its arrays are: label, x\."),
        ("a.zarr", ("x",), "fields must be left out for .*a.zarr, a single array"),
        ("a.zarr.zip", None, "A zarr store in a zip file must be on this machine, got the URL"),
    ],
)
def test_what_cannot_be_converted_is_said(
    s3: Endpoint, tmp_path: Path, name: str, fields: tuple[str, ...] | None, message: str
) -> None:
    store_array(s3.folder)
    store_group(s3.folder)
    with pytest.raises((ConversionError, SourceError), match=message):
        run(str(s3.url / name), tmp_path / "out", s3, reading=ReadOptions(fields=fields))
