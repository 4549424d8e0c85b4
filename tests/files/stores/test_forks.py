"""Stores in forked children of a process that has used them: obstore's own threads do not survive a fork."""

import gc
import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint, s3_keys
from penstock_test_processes import run_isolated

from penstock.core.errors import ReadError
from penstock.files.stores.clients.obstore_client import ObstoreClient
from penstock.files.stores.clients.process_client import ProcessClient
from penstock.files.stores.clients.shared_client import find_client
from penstock.files.stores.errors import MissingObjectError, ReplacedObjectError
from penstock.files.stores.store import Store, open_store
from penstock.files.unnamed import find_path

NUMBERS = np.arange(1_000_000, dtype="<u4")


@pytest.fixture
def used(s3: Endpoint, store: Store) -> Store:
    """A store that this process has read from."""
    (s3.folder / "numbers").write_bytes(NUMBERS.tobytes())
    assert read(store, 7, 1) == [7]
    return store


def read(store: Store, first: int, n: int, version: str | None = None) -> list[int]:
    found = np.frombuffer(store.read_range("numbers", 4 * first, 4 * n, version=version), "<u4")
    return list(found.tolist())


def client_pids(parent: int) -> list[int]:
    """Return the client processes of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            is_child = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        except OSError:
            continue
        if is_child and b"clients.client_process" in command:
            found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def do_everything(store: Store) -> list[Any]:
    """Return what each method does in a forked child."""
    info = store.describe("numbers")
    content, same = store.read_object("numbers", version=info.version)
    done: list[Any] = [read(store, 999_999, 1, info.version), np.frombuffer(content, "<u4").tolist()[123:125]]
    done += [same == info, sorted(found.key for found in store.list_objects())]
    done += [store.put("small", b"x", if_absent=True), store.put("small", b"y", if_absent=True)]
    with tempfile.TemporaryFile() as file:
        file.write(10 * NUMBERS.tobytes())
        file.seek(0)
        done.append(store.put_file("large", find_path(file.fileno())).n_bytes)
    for wrong in (
        lambda: store.describe("nothing"),
        lambda: read(store, 0, 1, "another"),
        lambda: read(store, 1_000_000, 1),
    ):
        try:
            wrong()
        except ReadError as error:
            done.append(type(error))
    store.remove("small")
    done.append(sorted(found.key for found in store.list_objects()))
    done.append(type(find_client(store.url.root, store._options).get()))  # type: ignore[attr-defined]
    return done


def test_a_forked_child_can_do_everything(used: Store) -> None:
    assert run_isolated(do_everything, used) == [
        [999_999],
        [123, 124],
        True,
        ["numbers"],
        True,
        False,
        40_000_000,
        MissingObjectError,
        ReplacedObjectError,
        ReadError,
        ["large", "numbers"],
        ProcessClient,
    ]
    assert read(used, 5, 2) == [5, 6]


def test_a_plain_fork_reads(used: Store) -> None:
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(sending, pickle.dumps(read(used, 3, 3)))
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        assert pickle.loads(pipe.read()) == [3, 4, 5]
    os.waitpid(pid, 0)


def look_for(client: "weakref.ref[ObstoreClient]", store: Store) -> tuple[bool, list[int]]:
    return client() is not None, read(store, 3, 3)


def test_a_client_is_not_released_in_a_forked_child(used: Store) -> None:
    # Its threads hold locks from time to time, and do not exist in the child: releasing it could wait for ever.
    client = find_client(used.url.root, used._options).get()  # type: ignore[attr-defined]
    assert isinstance(client, ObstoreClient)
    kept = weakref.ref(client)
    del client
    assert run_isolated(look_for, kept, used) == (True, [3, 4, 5])
    assert read(used, 5, 2) == [5, 6]


def read_with_a_lambda(s3: Endpoint) -> bytes:
    return open_store(s3.url, replace(s3.options, credentials=lambda: s3_keys())).read_object("numbers")[0]  # noqa: PLW0108


def test_credentials_that_cannot_be_pickled_are_asked_for_in_the_child(s3: Endpoint, used: Store) -> None:
    assert used.counts.requests == 1
    assert run_isolated(read_with_a_lambda, s3) == NUMBERS.tobytes()


def read_from_threads(store: Store) -> tuple[list[int], int]:
    """Read in threads; return what was read, and how many client processes that took."""
    found: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: read(store, n, 1)})) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[n][0] for n in range(32)], len(client_pids(os.getpid()))


def test_threads_of_a_child_share_one_client_process(used: Store) -> None:
    assert run_isolated(read_from_threads, used) == (list(range(32)), 1)


def read_in_grandchild(store: Store) -> tuple[list[int], list[int], int]:
    """Read here, in a child, and here again; return what was read, and how many descriptors the child inherited."""
    here = read(store, 1, 1)
    return here, run_isolated(read, store, 2, 1), run_isolated(count_connections, store)


def count_connections(_: Store) -> int:
    gc.collect()
    return sum(str(link.readlink()).startswith("socket:") for link in list_descriptors())


def list_descriptors() -> list[Path]:
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # not the one that lists them


def test_a_child_of_a_child_has_a_client_process_of_its_own(used: Store) -> None:
    here, below, connections = run_isolated(read_in_grandchild, used)
    assert (here, below) == ([1], [2])
    assert connections == run_isolated(count_connections, used)


def open_and_close(store: Store) -> tuple[int, int]:
    """Return the open descriptors before and after a store was used and closed, several times."""
    read(store, 0, 1)
    store.close()
    before = len(list_descriptors())
    for _ in range(3):
        read(store, 0, 1)
        store.close()
    assert client_pids(os.getpid()) == []
    return before, len(list_descriptors())


def test_closing_ends_the_client_process_and_leaks_no_descriptors(used: Store) -> None:
    before, after = run_isolated(open_and_close, used)
    assert before == after


def read_and_wait(store: Store, sending: Any) -> None:
    read(store, 0, 1)
    sending.send(client_pids(os.getpid()))
    signal.pause()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_client_process_ends_with_its_parent(used: Store, sent: signal.Signals) -> None:
    receiving, sending = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=read_and_wait, args=(used, sending))
    process.start()
    (client,) = receiving.recv()
    assert process.pid is not None
    os.kill(process.pid, sent)
    process.join()
    wait_until(lambda: is_gone(client))


def kill_client_and_read(store: Store) -> tuple[list[int], int]:
    read(store, 0, 1)
    (client,) = client_pids(os.getpid())
    os.kill(client, signal.SIGKILL)
    return read(store, 9, 1), store.counts.retries


def test_a_client_process_that_was_killed_is_replaced(used: Store) -> None:
    found, retries = run_isolated(kill_client_and_read, used)
    assert found == [9]
    assert retries >= 1


def test_a_process_that_was_forked_before_uses_obstore_itself(s3: Endpoint) -> None:
    (s3.folder / "numbers").write_bytes(NUMBERS.tobytes())
    script = (
        "import os, sys\n"
        "from penstock.files.stores.store import open_store\n"
        "from penstock.files.stores.url import Url\n"
        f"store = open_store(Url({str(s3.url)!r}))\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "else:\n"
        "    out = store.read_range('numbers', 4 * 77, 4)\n"
        "    from penstock.files.stores.clients.shared_client import _clients\n"
        "    print(out[0], [type(shared.get()).__name__ for shared in _clients.values()], flush=True)\n"
        "    os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **s3.environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split(maxsplit=1) == ["77", "['ObstoreClient']\n"]


class Rows:
    """A map-style dataset that reads a number at a time, and notes which client processes it had."""

    def __init__(self, s3: Endpoint, notes: Path) -> None:
        self.url, self.options, self.notes = s3.url, s3.options, notes

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> int:
        number = read(open_store(self.url, self.options), item * 1000, 1)[0]
        for pid in client_pids(os.getpid()):
            (self.notes / str(pid)).touch()
        return number


def load_rows(rows: Rows) -> list[int]:
    from torch.utils.data import DataLoader

    rows[0]
    loader = DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    return [number for _ in range(2) for batch in loader for number in batch.tolist()]


def test_workers_of_torch_read_and_leave_no_process(s3: Endpoint, used: Store, tmp_path: Path) -> None:
    assert used.counts.requests == 1
    assert run_isolated(load_rows, Rows(s3, tmp_path)) == [1000 * item for item in range(40)] * 2
    pids = [int(note.name) for note in tmp_path.iterdir()]
    assert len(pids) == 5  # of the process itself, and of two workers in each of two epochs
    wait_until(lambda: all(map(is_gone, pids)))
