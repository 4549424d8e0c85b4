"""A remote folder: the bytes of objects, with and without a cache folder, in several processes."""

import pickle
import shutil
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from penstock_span_reader import read_spans

from penstock import OptionError, ReadError
from penstock.files.spans.folder import measure_folder
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.span import WHOLE, Span
from penstock.files.stores.errors import MissingObjectError, ReplacedObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url

_N_BYTES = 100_000


def _bytes(number: int) -> bytes:
    return (np.arange(_N_BYTES, dtype=np.int64) * (number + 3) % 251).astype(np.uint8).tobytes()


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / "objects" / "deep").mkdir(parents=True, exist_ok=True)
        (tmp_path / "objects" / f"{number}.bin").write_bytes(_bytes(number))
    (tmp_path / "objects" / "deep" / "empty").write_bytes(b"")
    return tmp_path / "objects"


def _open(objects: Path, cache: Path | None = None, cache_bytes: int | None = None) -> RemoteFolder:
    url = Url(f"file://{objects}")
    return RemoteFolder(url, RemoteOptions.parse(url, None, cache, cache_bytes))


def _grid(number: int, n_bytes: int = 10_000) -> list[Span]:
    return [Span(f"{number}.bin", begin, begin + n_bytes) for begin in range(0, _N_BYTES, n_bytes)]


def test_what_was_read_counts_after_a_close_and_from_zero_in_a_copy(objects: Path) -> None:
    folder = _open(objects)
    folder.get(_grid(0))
    first = folder.transfers
    assert first.n_bytes == _N_BYTES
    folder.close()
    assert folder.transfers.n_bytes == _N_BYTES
    folder.get(_grid(1))
    assert folder.transfers.n_bytes == 2 * _N_BYTES
    assert folder.transfers.requests > first.requests
    folder.close()
    assert not pickle.loads(pickle.dumps(folder)).transfers


@pytest.mark.parametrize("has_cache", [False, True])
def test_spans_have_the_bytes_of_their_objects(objects: Path, tmp_path: Path, has_cache: bool) -> None:
    folder = _open(objects, tmp_path / "cache" if has_cache else None)
    asked = [*_grid(2), *_grid(0)[::-1], Span("1.bin", 7, 8), Span("3.bin", 0, WHOLE), Span("deep/empty", 0, WHOLE)]
    for _ in range(2):
        assert folder.prepare(asked[:5]) >= 0
        for span, content in zip(asked, folder.get(asked), strict=True):
            expected = (objects / span.key).read_bytes()[span.begin : None if span.end == WHOLE else span.end]
            assert content.tobytes() == expected
            assert not content.flags.writeable or has_cache
        folder.release(asked)
    assert folder.read_object("1.bin") == _bytes(1)
    folder.close()
    assert folder.read_object("1.bin") == _bytes(1)
    folder.close()


def test_objects_are_listed_and_described(objects: Path) -> None:
    folder = _open(objects)
    assert folder.describe("1.bin").n_bytes == _N_BYTES
    assert sorted((found.key, found.n_bytes) for found in folder.list_objects()) == [
        *((f"{number}.bin", _N_BYTES) for number in range(4)),
        ("deep/empty", 0),
    ]
    assert [found and found.n_bytes for found in folder.describe_all(["deep/empty", "none", "0.bin"])] == [
        0,
        None,
        _N_BYTES,
    ]
    with pytest.raises(MissingObjectError, match="none"):
        folder.get([Span("none", 0, 10)])
    folder.close()


def test_a_cache_is_read_by_the_next_process_without_a_request(objects: Path, tmp_path: Path) -> None:
    first = _open(objects, tmp_path / "cache", 10 << 20)
    first.list_objects()
    first.get([*_grid(0), *_grid(1)])
    again = pickle.loads(pickle.dumps(first))
    first.close()
    assert again.prepare([*_grid(0), *_grid(1)]) == 0
    assert b"".join(content.tobytes() for content in again.get(_grid(1))) == _bytes(1)
    assert (again.transfers.requests, again.transfers.hits, again.transfers.misses) == (0, 10, 0)
    again.close()


def test_an_object_that_was_replaced_is_refused_and_read_again_by_a_new_reader(objects: Path, tmp_path: Path) -> None:
    folder = _open(objects, tmp_path / "cache", 10 << 20)
    folder.list_objects()
    folder.get(_grid(0)[:2])
    (objects / "new").write_bytes(_bytes(9))
    (objects / "new").replace(objects / "0.bin")
    assert folder.get(_grid(0)[:1])[0].tobytes() == _bytes(0)[:10_000]  # of the pinned version, from the cache
    with pytest.raises(ReplacedObjectError, match=r"0\.bin"):
        folder.get(_grid(0)[5:6])
    folder.close()
    later = _open(objects, tmp_path / "cache", 10 << 20)
    assert b"".join(content.tobytes() for content in later.get(_grid(0))) == _bytes(9)
    later.close()


@pytest.mark.parametrize("harm", ["delete", "flip", "truncate", "replace by a file"])
def test_a_cache_that_is_harmed_is_mended(objects: Path, tmp_path: Path, harm: str) -> None:
    cache = tmp_path / "cache"
    folder = _open(objects, cache, 10 << 20)
    folder.get(_grid(0))
    for path in [path for path in cache.rglob("*-*") if path.is_file() and path.suffix != ".json"]:
        content = bytearray(path.read_bytes())
        content[17] ^= 255
        path.write_bytes(content[:50] if harm == "truncate" else content)
    if harm in ("delete", "replace by a file"):
        shutil.rmtree(cache)
    if harm == "replace by a file":
        cache.write_text("in the way")
    for _ in range(2):
        assert b"".join(content.tobytes() for content in folder.get(_grid(0))) == _bytes(0)
    folder.close()


def test_a_cache_never_holds_more_than_it_may(objects: Path, tmp_path: Path) -> None:
    folder = _open(objects, tmp_path / "cache", 45_000)
    for number in (0, 1, 2, 0):
        for span in _grid(number):
            assert folder.get([span])[0].tobytes() == _bytes(number)[span.begin : span.end]
            folder.release([span])
            assert measure_folder(tmp_path / "cache") <= 45_000
    folder.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_processes_download_each_span_once(objects: Path, tmp_path: Path, method: str) -> None:
    folder = _open(objects, tmp_path / "cache", 10 << 20)
    folder.list_objects()
    context: Any = get_context(method)
    barrier, results = context.Barrier(2), context.Queue()
    spans = [span for number in range(4) for span in _grid(number)]
    processes = [context.Process(target=read_spans, args=(folder, spans, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert {content for content, _ in found} == {b"".join(map(_bytes, range(4)))}
    assert sum(n_bytes for _, n_bytes in found) == 4 * _N_BYTES
    folder.close()


def test_many_threads_read_the_same_objects(objects: Path, tmp_path: Path) -> None:
    folder = _open(objects, tmp_path / "cache", 200_000)
    wrong: list[int] = []

    def read(number: int) -> None:
        spans = _grid(number % 4, 5_000)
        for turn in range(10):
            mine = spans[turn % 3 :: 3]
            folder.prepare(mine)
            wrong.extend(
                span.begin
                for span, content in zip(mine, folder.get(mine), strict=True)
                if content.tobytes() != _bytes(number % 4)[span.begin : span.end]
            )
            folder.release(mine[::2])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    folder.close()


def test_what_is_not_to_be_kept_is_not_in_the_cache(objects: Path, tmp_path: Path) -> None:
    folder = _open(objects, tmp_path / "cache", 10 << 20)
    kept, other = Span("0.bin", 0, 100), Span("0.bin", 100, 150, is_kept=False)
    folder.prepare([kept, other])
    assert b"".join(content.tobytes() for content in folder.get([kept, other])) == _bytes(0)[:150]
    folder.release([kept, other])
    assert [path.name for path in (tmp_path / "cache").rglob("*-*") if path.suffix != ".json"] == ["0-100"]
    folder.close()


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    url = Url("s3://bucket/x")
    with pytest.raises(OptionError, match="cache_bytes=5 needs cache"):
        RemoteOptions.parse(url, None, None, 5)
    with pytest.raises(OptionError, match="cache is for URLs, got the local path"):
        RemoteOptions.parse(tmp_path, None, tmp_path / "c", None)
    with pytest.raises(OptionError, match="cache must be a folder of this machine"):
        RemoteOptions.parse(url, None, "s3://bucket/cache", None)
    with pytest.raises(OptionError, match="cache_bytes must be an integer >= 1"):
        RemoteOptions.parse(url, None, tmp_path / "c", 0)
    by_default = RemoteOptions.parse(url, None, tmp_path / "c", None).cache_bytes
    assert 0 < by_default < shutil.disk_usage(tmp_path).free


def test_no_thread_is_left_when_the_last_folder_is_closed(objects: Path) -> None:
    # Folders share threads with those of other tests, unless they have another number of connections.
    url, before = Url(f"file://{objects}"), set(threading.enumerate())
    folder, other = (RemoteFolder(url, RemoteOptions(StoreOptions(connections=7))) for _ in range(2))

    def fetching() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    for _ in range(2):  # opened again by a read
        other.get(_grid(1))
        folder.get(_grid(0))
        folder.close()
        assert fetching()  # of the other folder
        other.close()
        assert not fetching()


def test_a_closed_folder_ends_a_read_that_waits(objects: Path) -> None:
    folder = _open(objects)
    folder.get(_grid(0)[:1])
    process = folder._open()
    folder.close()
    with pytest.raises(ReadError, match="closed"):
        process.get(_grid(1))


def test_versions_of_very_many_objects_are_forgotten(s3: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.files.spans.remote_folder._MOST_PINNED", 3)
    for number in range(6):
        (s3.folder / f"{number}").write_bytes(b"%d" % number)
    folder = RemoteFolder(s3.url, RemoteOptions(s3.options))
    assert [folder.read_object(f"{number}") for number in range(6)] == [b"%d" % number for number in range(6)]
    assert sorted(folder._pinned) == ["3", "4", "5"]
