"""Chunks that were there when a source was opened must be there; those of sparse arrays are the fill value."""

import http.server
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from penstock import DamageError, Loader, OptionError, Plan, ResumeError, RunOptions, Sequential, Span, Zip
from penstock.source.combine import Concat
from penstock.source.select.selectable import Take
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr import keys as chunk_keys
from penstock.source.stored.zarr.keys import ChunkKeys, list_files
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource

DATA = np.arange(1, 151, dtype="i4").reshape(50, 3)
FILL = 7

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "v2 with dots": ({"zarr_format": 2}, "2.1"),
    "v2 with slashes": ({"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}}, "2/1"),
    "v3": ({}, "c/2/1"),
    "v3 with dots": ({"chunk_key_encoding": {"name": "default", "separator": "."}}, "c.2.1"),
    "v3 with names of v2": ({"chunk_key_encoding": {"name": "v2", "separator": "."}}, "2.1"),
    "shards": ({"chunks": (5, 1), "shards": (10, 2)}, "c/2/1"),
    "read by zarr-python": ({"zarr_format": 2, "order": "F"}, "2.1"),
    "shards, read by zarr-python": (
        {"chunks": (5, 1), "shards": (10, 2), "dtype": "i4", "filters": "transpose"},
        "c/2/1",
    ),
}
layouts = pytest.mark.parametrize(("options", "key"), LAYOUTS.values(), ids=LAYOUTS)


def write(path: Path, options: dict[str, Any], rows: int = 50) -> Path:
    """Write chunks of 10 x 2 of the first rows; row r holds 3 r + 1 to 3 r + 3."""
    given = {"chunks": (10, 2), "dtype": "i4", "fill_value": FILL, **options}
    if given.pop("filters", None) == "transpose":
        given["filters"] = [zarr.codecs.TransposeCodec(order=(1, 0))]
    zarr.create_array(path, shape=DATA.shape, **given)[:rows] = DATA[:rows]
    return path


@layouts
def test_a_chunk_that_disappears_is_an_error_that_names_array_chunk_and_file(
    tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    path = write(tmp_path / "a", options)
    source, filling = ZarrSource(path), ZarrSource(path, missing_chunks="fill")
    assert source.read(Span(0, 50))["data"].tobytes() == DATA.tobytes()
    (path / key).unlink()
    again = pickle.loads(pickle.dumps(source))
    for reader in (source, again):
        with pytest.raises(DamageError) as caught:
            reader.take(np.array([3, 27]))
        assert f" of {path}" in caught.value.shard
        assert caught.value.item is not None
        assert 20 <= caught.value.item < 30
        assert f"{path}/{key} is missing, but was there when the array was opened" in caught.value.reason
        assert "missing_chunks='fill'" in caught.value.reason
        assert reader.read(Span(0, 20))["data"].tobytes() == DATA[:20].tobytes()
    wanted = DATA.copy()
    wanted[20:30, 2] = FILL
    assert filling.read(Span(0, 50))["data"].tobytes() == wanted.tobytes()


@layouts
def test_an_array_that_is_sparse_from_the_start_has_its_fill_value(
    tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    path = write(tmp_path / "a", options, rows=20)
    assert not (path / key).exists()
    wanted = DATA.copy()
    wanted[20:] = FILL
    source = ZarrSource(path)
    assert source.read(Span(0, 50))["data"].tobytes() == wanted.tobytes()
    (path / key.replace("2", "1", 1)).unlink()
    with pytest.raises(DamageError, match="was there when the array was opened"):
        source.read(Span(10, 20))
    assert source.read(Span(20, 50))["data"].tobytes() == wanted[20:].tobytes()


@layouts
def test_an_array_that_must_be_complete_has_no_chunk_that_was_lost_before(
    tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    path = write(tmp_path / "a", options)
    (path / key).unlink()
    source = ZarrSource(path, missing_chunks="error")
    assert source.read(Span(0, 20))["data"].tobytes() == DATA[:20].tobytes()
    with pytest.raises(DamageError, match=rf"{path}/{key} is missing\. Restore it, or use missing_chunks='fill'"):
        source.take(np.array([3, 27]))


def test_a_chunk_deleted_in_the_middle_of_an_epoch_ends_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {})
    source = ZarrSource(path)
    plan = Plan(source.index, Sequential(), batch_size=10)
    batches = iter(Loader(source, plan, options=RunOptions(executor="inline")))
    found = [next(batches)["data"][:, 0].tolist()]
    shutil.rmtree(path / "c" / "3")
    found += [next(batches)["data"][:, 0].tolist() for _ in range(2)]
    with pytest.raises(DamageError, match=r"chunk \(3, 0\) of .*c/3/0 is missing"):
        next(batches)
    assert found == DATA[:, 0].reshape(5, 10)[:3].tolist()


def test_a_state_of_complete_data_is_refused_if_chunks_are_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {})

    def loader(**options: Any) -> Loader:
        source = ZarrSource(path, **options)
        return Loader(source, Plan(source.index, Sequential(), batch_size=10))

    state = loader().state_dict()
    assert "." not in state["plan"]["data"], "states of complete data are as they always were"
    (path / "c" / "2" / "1").unlink()
    with pytest.raises(ResumeError, match=r"chunks of the stored arrays are missing.*missing_chunks='fill'"):
        loader().load_state_dict(state)
    loader(missing_chunks="fill").load_state_dict(state)
    sparse = loader().state_dict()
    loader().load_state_dict(sparse)
    (path / "c" / "1" / "1").unlink()
    with pytest.raises(ResumeError, match="or others than before"):
        loader().load_state_dict(sparse)


def test_combined_sources_say_what_is_stored(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {})
    whole = [ZarrSource(path).index.digest]
    combined = {
        "zip": lambda: Zip([ZarrSource(path, {"x": "."}), ZarrSource(path, {"y": "."})]),
        "concat": lambda: Concat([ZarrSource(path), ZarrSource(path)]),
        "take": lambda: Take(ZarrSource(path), [3, 1]),
    }
    before = {name: make().index for name, make in combined.items()}
    (path / "c" / "2" / "1").unlink()
    assert ZarrSource(path).index.digest.startswith(f"{whole[0]}.")
    for name, make in combined.items():
        assert make().index.digest.startswith(f"{before[name].digest}."), name


def test_patches_of_a_volume_that_loses_a_chunk_are_refused(tmp_path: Path) -> None:
    values = np.arange(1, 1001, dtype="f4").reshape(10, 10, 10)
    zarr.create_array(tmp_path / "v", data=values, chunks=(5, 5, 5), fill_value=-1)

    def opened(**options: Any) -> VolumeSource:
        image = Multiscale.plain(tmp_path / "v", (1, 1, 1))
        return VolumeSource({"raw": VolumeArray(image, (3, 3, 3), (1, 1, 1))}, pad=False, **options)

    source, filling = opened(), opened(missing_chunks="fill")
    (tmp_path / "v" / "c" / "1" / "1" / "1").unlink()
    last = np.array([len(source.index) - 1])
    with pytest.raises(DamageError, match=r"chunk \(1, 1, 1\) of .*/v: .*c/1/1/1 is missing, but was there"):
        source.take(last)
    for reader in (filling, opened()):
        assert (reader.take(last)["raw"] == -1).all()
    with pytest.raises(DamageError, match=r"c/1/1/1 is missing\. Restore it"):
        opened(missing_chunks="error").take(last)
    with pytest.raises(OptionError, match="missing_chunks must be 'error', 'fill' or None, got 'zero'"):
        opened(missing_chunks="zero")


# -- where chunks cannot be listed -------------------------------------------------------------------------------------


def test_more_files_than_are_listed_must_all_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", {"zarr_format": 2}, rows=20)
    assert list_files(path, ChunkKeys("", ".", (5, 2)), limit=3) is None
    monkeypatch.setattr(list_files, "__defaults__", (3,))
    source = ZarrSource(path)
    assert source.read(Span(0, 20))["data"].tobytes() == DATA[:20].tobytes()
    with pytest.raises(DamageError, match=r"whether it was ever stored is not known: .*missing_chunks='fill'"):
        source.read(Span(20, 30))
    assert (ZarrSource(path, missing_chunks="fill").read(Span(20, 30))["data"] == FILL).all()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"chunks": (5, 2), "shards": (10, 2)}])
def test_a_chunk_that_a_server_does_not_find_is_an_error(tmp_path: Path, options: dict[str, Any], server: str) -> None:
    pytest.importorskip("obstore")
    path = write(tmp_path / "a", options)
    url = f"{server}/a"
    assert ZarrSource(url).read(Span(0, 50))["data"].tobytes() == DATA.tobytes()
    source = ZarrSource(url)
    for file in path.glob("**/2*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    with pytest.raises(DamageError, match=r"chunk \([24], [01]\) of http.*whether it was ever stored is not known"):
        source.read(Span(20, 30))
    assert source.read(Span(30, 50))["data"].tobytes() == DATA[30:].tobytes()
    assert (ZarrSource(url, missing_chunks="fill").read(Span(20, 30))["data"] == FILL).all()


# -- names -------------------------------------------------------------------------------------------------------------


def test_only_names_as_zarr_writes_them_count(tmp_path: Path) -> None:
    for name in ("0.0", "1.1", "01.0", "0.2", "2.0", "-1.0", "0.0.0", "0.0~", ".zarray", "٣.0", "0", f"{10**30}.0"):
        (tmp_path / name).touch()
    found = list_files(tmp_path, ChunkKeys("", ".", (2, 2)))
    assert found is not None
    assert found.list_numbers() == [0, 3]
    assert [number in found for number in range(-1, 5)] == [False, True, False, False, True, False]
    full = list_files(tmp_path, ChunkKeys("", ".", (1, 1)))
    assert full is not None
    assert full.digest == ""
    assert list_files(tmp_path / "nothing", ChunkKeys("c/", "/", (2, 2))).list_numbers() == []  # type: ignore[union-attr]


@pytest.mark.parametrize(("prefix", "separator"), [("", "."), ("", "/"), ("c/", "/"), ("c.", ".")])
@pytest.mark.parametrize("counts", [(3,), (2, 3), (2, 1, 1), (1, 2, 3)])
def test_numbers_and_names_of_chunks_agree(
    tmp_path: Path, prefix: str, separator: str, counts: tuple[int, ...]
) -> None:
    keys = ChunkKeys(prefix, separator, counts)
    assert ChunkKeys.parse_first(keys.key((0,) * len(counts)), counts) == (
        keys if len(counts) > 1 or prefix else ChunkKeys("", ".", counts)
    )
    stored = []
    for number, at in enumerate(np.ndindex(counts)):
        assert (keys.number(at), keys.coordinates(number), keys.find(keys.key(at))) == (number, at, at)
        if number % 2:
            file = tmp_path / keys.key(at)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            stored.append(number)
    assert list_files(tmp_path, keys).list_numbers() == stored  # type: ignore[union-attr]
    assert chunk_keys.ChunkKeys.parse_first("chunk0", counts) is None
