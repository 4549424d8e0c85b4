"""Zarr arrays and HDF5 files at URLs: the same items as on this machine, few requests, any worker."""

import pickle
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_remote import Endpoint
from penstock_source_suite import Case, SourceSuite

from penstock import DamageError, Loader, OptionError, Plan, ReadError, RunOptions, Shuffle, SourceError, Span
from penstock.files.stores.errors import ReplacedObjectError
from penstock.source.stored.source import ZarrSource

DATA = np.arange(1, 1 + 230 * 6, dtype="f4").reshape(230, 6)
ITEMS = np.array([229, 0, 0, 117, 3, 90, 89])
KINDS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v2": {"zarr_format": 2},
    "nested": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "flat": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "raw": {"compressors": None},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec()},
    "sharded": {"shards": (60, 6)},
    "sharded_raw": {"shards": (60, 6), "compressors": None},
    "index_first": {
        "shards": {"shape": (60, 6), "index_location": "start"},
    },
    "transposed": {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
}


def write(path: Path, kind: str = "v3", data: np.ndarray = DATA) -> Path:
    zarr.create_array(path, data=data, chunks=(10, 3), **KINDS[kind])
    return path


def as_bytes(block: Any) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in block.items()}


def check_same(source: ZarrSource, local: ZarrSource) -> None:
    n = len(local.index)
    for start, stop in ((0, n), (7, n - 1), (5, 5)):
        assert as_bytes(source.read(Span(start, stop))) == as_bytes(local.read(Span(start, stop)))
    for reader in (source, pickle.loads(pickle.dumps(source))):
        assert as_bytes(reader.take(ITEMS)) == as_bytes(local.take(ITEMS))


@pytest.fixture(params=["s3", "http", "cache"])
def open_remote(
    request: pytest.FixtureRequest, s3: Endpoint, http_files: Endpoint, tmp_path: Path
) -> Callable[..., ZarrSource]:
    """Return what opens a copy of a local store at a URL."""

    def open_copy(path: Path, *args: Any, **options: Any) -> ZarrSource:
        server = http_files if request.param == "http" else s3
        if request.param == "cache":
            options |= {"cache": tmp_path / "cache", "cache_bytes": 1 << 20}
        shutil.copytree(path, server.folder / path.name)
        return ZarrSource(str(server.url / path.name), *args, store=server.options, **options)

    return open_copy


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_read_as_on_this_machine(
    tmp_path: Path, kind: str, open_remote: Callable[..., ZarrSource]
) -> None:
    local = ZarrSource(write(tmp_path / "a.zarr", kind))
    source = open_remote(tmp_path / "a.zarr")
    check_same(source, local)
    assert source.index.digest == local.index.digest, "so that a state of one resumes on the other"
    if kind != "transposed":  # zarr-python reads it, and says nothing of objects
        assert source.stored_bytes == pytest.approx(local.stored_bytes, rel=0.2)


def test_groups_and_selections(tmp_path: Path, open_remote: Callable[..., ZarrSource]) -> None:
    root = tmp_path / "g.zarr"
    zarr.create_group(root)
    for name, kind in (("x", "v3"), ("y", "sharded")):
        write(root / name, kind, DATA + 1000 * (name == "y"))
    zarr.create_group(root / "z")
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(str(root))
    source = open_remote(root)
    assert list(source.fields) == ["x", "y"]
    check_same(source, ZarrSource(root))
    fields = {"a": ("x", slice(1, 3)), "b": ("y", 5)}
    chosen = ZarrSource(source.path, fields, **_remote_options(source))
    check_same(chosen, ZarrSource(root, fields))


def _remote_options(source: ZarrSource) -> dict[str, Any]:
    options = source._remotes.folders[0].options
    return {"store": options.store}


def test_the_arrays_of_a_group_that_lists_none_are_looked_for(
    s3: Endpoint, http_files: Endpoint, tmp_path: Path
) -> None:
    for server in (s3, http_files):
        zarr.create_group(server.folder / "g")
        write(server.folder / "g" / "x")
        write(server.folder / "g" / "old", "v2")
        (server.folder / "plain").mkdir()
        write(server.folder / "plain" / "x")
    assert list(ZarrSource(str(s3.url / "g"), store=s3.options).fields) == ["old", "x"]
    assert list(ZarrSource(str(s3.url / "plain"), store=s3.options).fields) == ["x"]
    with pytest.raises(SourceError, match=r"g must be named, as in fields=\['x', 'y'\]: its server lists nothing"):
        ZarrSource(str(http_files.url / "g"))
    assert len(ZarrSource(str(http_files.url / "g"), ["x"]).index) == 230
    with pytest.raises(SourceError, match=r"No zarr array in s3://bucket/.*/nothing"):
        ZarrSource(str(s3.url / "nothing"), store=s3.options)


def test_a_chunk_costs_one_request_and_those_of_a_read_come_at_once(s3: Endpoint) -> None:
    write(s3.folder / "a")
    source = ZarrSource(str(s3.url / "a"), store=s3.options)
    source.close()  # what was read to open it is forgotten
    s3.reset_counts()
    source.take(np.array([0, 229, 55]))
    asked = [(method, key) for method, key, _, _ in s3.log()]
    assert sorted(asked) == sorted(("GET", f"a/c/{row}/{column}") for row in (0, 22, 5) for column in (0, 1))
    assert s3.most_in_flight() > 1
    source.take(np.array([1, 228]))
    assert len(s3.log()) == 6, "they are in memory"
    assert source.transfers is not None
    assert source.transfers.requests >= 6


def test_what_is_in_the_cache_folder_is_not_downloaded_again(s3: Endpoint, tmp_path: Path) -> None:
    write(s3.folder / "a", "sharded")
    options: dict[str, Any] = {"store": s3.options, "cache": tmp_path / "cache", "cache_bytes": 1 << 20}
    first = as_bytes(ZarrSource(str(s3.url / "a"), **options).read(Span(0, 230)))
    s3.reset_counts()
    source = ZarrSource(str(s3.url / "a"), **options)
    assert source.cache_bytes == 1 << 20
    assert as_bytes(source.read(Span(0, 230))) == first == {"data": DATA.tobytes()}
    assert s3.n_bytes("GET", "a/c/0/0") == 0


def test_a_chunk_that_is_replaced_is_an_error_and_not_other_data(s3: Endpoint) -> None:
    write(s3.folder / "a", "raw")
    source = ZarrSource(str(s3.url / "a"), store=s3.options)
    assert source.take(np.array([0]))["data"].tobytes() == DATA[:1].tobytes()
    source.close()
    (s3.folder / "a" / "c" / "0" / "0").write_bytes(bytes(120))
    with pytest.raises(ReadError, match=r"Could not read chunk \(0, 0\) of s3://.*/a: ") as caught:
        source.take(np.array([0]))
    assert isinstance(caught.value.__cause__, ReplacedObjectError)


def test_missing_chunks_of_a_sparse_array(s3: Endpoint) -> None:
    write(s3.folder / "a", "raw")
    (s3.folder / "a" / "c" / "1" / "0").unlink()
    source = ZarrSource(str(s3.url / "a"), store=s3.options)
    with pytest.raises(DamageError, match=r"chunk \(1, 0\) of s3://.*whether it was ever stored is not known"):
        source.take(np.array([10]))
    filled = ZarrSource(str(s3.url / "a"), store=s3.options, missing_chunks="fill")
    wanted = DATA.copy()
    wanted[10:20, :3] = 0
    assert filled.read(Span(0, 30))["data"].tobytes() == wanted[:30].tobytes()


def test_hdf5_at_a_url(tmp_path: Path, s3: Endpoint, http_files: Endpoint) -> None:
    h5py = pytest.importorskip("h5py")
    for server in (s3, http_files):
        with h5py.File(server.folder / "r.h5", "w") as file:
            file["g/whole"] = DATA
            file.create_dataset("chunked", data=DATA * 2, chunks=(16, 6), compression="gzip")
        fields = {"a": "g/whole", "b": ("chunked", 2)}
        source = ZarrSource(str(server.url / "r.h5"), fields, store=server.options)
        local = ZarrSource(server.folder / "r.h5", fields)
        check_same(source, local)
        assert source.index.digest == local.index.digest
        assert source.prepare(ITEMS) == 0, "the only block is in memory"
        one = ZarrSource(str(server.url / "r.h5" / "chunked"), store=server.options)
        assert one.take(ITEMS)["data"].tobytes() == (DATA * 2)[ITEMS].tobytes()
        with pytest.raises(SourceError, match=r"has no dataset 'nothing'; it has chunked, g/whole"):
            ZarrSource(str(server.url / "r.h5" / "nothing"), store=server.options)
        with pytest.raises(SourceError, match=r"Name one in the path, '.*/r\.h5/chunked'"):
            ZarrSource(str(server.url / "r.h5"), store=server.options)
        with pytest.raises(SourceError, match=r"^Could not open [^ ]*/none\.h5: there is no such object\.$"):
            ZarrSource(str(server.url / "none.h5" / "x"), store=server.options)


def test_options_of_a_url_are_refused_for_a_path(tmp_path: Path, s3: Endpoint) -> None:
    path = write(tmp_path / "a")
    with pytest.raises(OptionError, match="cache is for URLs, got the local path"):
        ZarrSource(path, cache=tmp_path / "cache")
    with pytest.raises(OptionError, match="store is for URLs, got the local path"):
        ZarrSource(path, store=s3.options)
    with pytest.raises(OptionError, match="cache_bytes=5 needs cache"):
        ZarrSource(str(s3.url / "a"), store=s3.options, cache_bytes=5)


class TestRemoteZarrSource(SourceSuite):
    @pytest.fixture
    def case(self, s3: Endpoint) -> Case:
        write(s3.folder / "a", "sharded")
        write(s3.folder / "b", "sharded", DATA + 1)
        return Case(
            lambda: ZarrSource(str(s3.url / "a"), store=s3.options),
            lambda item: {"data": DATA[item]},
            len(DATA),
            lambda: ZarrSource(str(s3.url / "b"), store=s3.options),
        )


# -- workers -----------------------------------------------------------------------------------------------------------


def test_a_source_that_was_used_is_read_by_a_forked_child(s3: Endpoint) -> None:
    write(s3.folder / "a")
    source = ZarrSource(str(s3.url / "a"), store=s3.options)
    source.take(ITEMS)
    source.close()
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=lambda: theirs.send_bytes(source.take(ITEMS)["data"].tobytes()))
    child.start()
    assert ours.poll(120)
    assert ours.recv_bytes() == DATA[ITEMS].tobytes()
    child.join()


@pytest.mark.parametrize(
    ("executor", "kind"),
    [("inline", "transposed"), ("threads", "v3"), ("threads", "sharded"), ("fork", "sharded"), ("spawn", "v3")],
)
def test_batches_are_the_same_for_all_executors(s3: Endpoint, executor: str, kind: str) -> None:
    write(s3.folder / "a", kind)
    source = ZarrSource(str(s3.url / "a"), store=s3.options)
    plan = Plan(source.index, Shuffle(), batch_size=23, seed=5)
    orders = [np.concatenate(list(plan.epoch(epoch).items(range(10)))) for epoch in range(2)]
    wanted = [DATA[items].tobytes() for order in orders for items in order.reshape(10, 23)]
    chosen: Any = executor if executor in ("inline", "threads") else "processes"
    options = RunOptions(executor=chosen, start_method=executor if chosen == "processes" else None)  # type: ignore[arg-type]
    with Loader(source, plan, num_workers=0 if executor == "inline" else 2, options=options) as loader:
        found = [batch["data"].numpy().tobytes() for _ in range(2) for batch in loader]
    assert found == wanted
