"""An object as a file: the same bytes as the file itself, by any reads, and h5py on top of it."""

import gc
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ReadError
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.seekable_file import RemoteFile
from penstock.files.spans.span import Span
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.store import open_store
from penstock.files.stores.url import Url

CONTENT = np.arange(1, 26, dtype="<u4").tobytes()  # 100 bytes
_REMOTE = RemoteOptions()


@pytest.fixture(scope="module", autouse=True)
def without_obstore() -> Iterator[None]:
    """Files do not need it, and processes that are forked in other tests must not find it in use."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("obstore", "obstore.store"):
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RemoteFolder:
    path = tmp_path_factory.mktemp("objects")
    (path / "a.bin").write_bytes(CONTENT)
    (path / "empty").touch()
    return RemoteFolder(Url(f"file://{path}"), _REMOTE)


def test_the_thread_that_fetches_never_waits_for_a_lock_of_the_reader_to_finalize_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    folder = RemoteFolder(Url(f"file://{tmp_path}"), _REMOTE)
    held, threads = threading.RLock(), []

    class NeedsLock:
        def __del__(self) -> None:
            with held:
                pass

    store_type = type(open_store(folder.url))
    read_range = store_type.read_range

    def collect_and_read(*args: object, **options: object) -> object:
        threads.append(threading.current_thread())
        cycle = [NeedsLock()]
        cycle.append(cycle)  # type: ignore[arg-type]  # a cycle
        del cycle
        if gc.isenabled():  # as Python does whenever it likes
            gc.collect()
        return read_range(*args, **options)  # type: ignore[arg-type]  # as they are

    monkeypatch.setattr(store_type, "read_range", collect_and_read)
    assert gc.isenabled()
    with RemoteFile(folder, "a.bin", block_bytes=10) as file, held:  # as h5py holds its own
        assert file.read(35) == CONTENT[:35]
    assert threading.current_thread() not in threads
    assert gc.isenabled()
    gc.collect()


@given(
    block_bytes=st.sampled_from([1, 7, 64, 100, 1000]),
    reads=st.lists(st.tuples(st.integers(0, 110), st.integers(0, 110)), max_size=8),
)
def test_any_reads_give_the_bytes_of_the_file(
    folder: RemoteFolder, block_bytes: int, reads: list[tuple[int, int]]
) -> None:
    with RemoteFile(folder, "a.bin", block_bytes=block_bytes) as file:
        for begin, size in reads:
            assert file.seek(begin) == begin
            assert file.read(size) == CONTENT[begin : begin + size]
            assert file.tell() == max(begin, min(begin + size, 100))
        assert file.seek(-8, io.SEEK_END) == 92
        assert file.readall() == CONTENT[92:]


def test_it_is_a_file_that_is_only_read(folder: RemoteFolder) -> None:
    with RemoteFile(folder, "a.bin") as file:
        assert (file.readable(), file.seekable(), file.writable(), file.n_bytes) == (True, True, False, 100)
        assert [io.BufferedReader(file).read(30) for _ in range(1)] == [CONTENT[:30]]
        with pytest.raises(ValueError, match="must be >= 0, got -1"):
            RemoteFile(folder, "a.bin").seek(-1)
    assert RemoteFile(folder, "empty").read(5) == b""
    with pytest.raises(MissingObjectError):
        RemoteFile(folder, "nothing")


def test_threads_may_read_at_any_place_at_once(folder: RemoteFolder) -> None:
    file, wrong = RemoteFile(folder, "a.bin", block_bytes=7), list[int]()

    def read(begin: int) -> None:
        for _ in range(200):
            out = bytearray(20)
            if file.read_at(begin, out) != min(20, 100 - begin) or out[:10] != CONTENT[begin : begin + 10]:
                wrong.append(begin)

    threads = [threading.Thread(target=read, args=(begin,)) for begin in (0, 13, 55, 90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_sequence_of_reads_is_fetched_ahead(folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = RemoteFolder.prepare

    def prepare(self: RemoteFolder, spans: Sequence[Span]) -> int:
        asked.extend(span.begin for span in spans)
        return real(self, spans)

    monkeypatch.setattr(RemoteFolder, "prepare", prepare)
    file = RemoteFile(folder, "a.bin", block_bytes=10)
    file.seek(50)
    file.read(3)
    assert asked == [], "a single read may be the only one"
    file.seek(0)
    for _ in range(10):
        file.read(10)
    assert sorted(asked) == [10, 20, 30, 40, 60, 70, 80, 90], "each block once, but those that are there already"


def test_h5py_reads_through_it_and_gets_its_errors(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    values = np.arange(300_000, dtype="i4").reshape(-1, 10)
    with h5py.File(tmp_path / "a.h5", "w") as made:
        made["x"] = values
        made.create_dataset("g/y", data=values, chunks=(1000, 10), compression="gzip")
    remote = RemoteFolder(Url(f"file://{tmp_path}"), _REMOTE)
    with RemoteFile(remote, "a.h5", block_bytes=1 << 16) as file, h5py.File(file, "r") as found:
        assert (found["g/y"][7:1234] == values[7:1234]).all()
        os.truncate(tmp_path / "a.h5", 100_000)
        with pytest.raises(ReadError, match=r"a\.h5"):
            found["x"][20_000:]


def test_folders_are_listed_without_what_is_in_them(tmp_path: Path) -> None:
    for name in ("a/x", "a/b/y", "a0/z", "a-b/z", "c", "d/e/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    folder = RemoteFolder(Url(f"file://{tmp_path}"), _REMOTE)
    assert folder.list_folders() == ["a", "a-b", "a0", "d"]
    assert (folder.list_folders("a"), folder.list_folders("d/"), folder.list_folders("c")) == (["b"], ["e"], [])


def test_importing_it_needs_no_h5py() -> None:
    code = "import penstock.files.spans.seekable_file, sys; assert 'h5py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
