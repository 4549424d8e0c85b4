"""One writer at a time at a URL, and one that died is told from one that lives."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from penstock_remote import Endpoint
from penstock_test_parts import eventually

from penstock.core.errors import WriteError
from penstock.files.leases import Lease
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.open_store import open_store
from penstock.files.stores.protocol import ObjectInfo, Store


@pytest.fixture
def store(s3: Endpoint) -> Iterator[Store]:
    found = open_store(s3.url, s3.options)
    yield found
    found.close()


def put_lock(store: Store, number: int = 0, **about: object) -> None:
    """Put the lock of a writer on another machine."""
    known = {"owner": "x", "host": "node7", "machine": "other", "processes": "pid:[1]", "process": 7, "started": 1}
    store.put(f".writing/lock-{number}.json", json.dumps({**known, **about}).encode())


def names(store: Store) -> list[str]:
    return sorted(info.key for info in store.list_objects(".writing"))


def test_a_second_writer_is_refused_with_who_holds_the_lock_until_it_is_released(store: Store) -> None:
    first = Lease(store, ".writing")
    assert first.is_held
    with pytest.raises(WriteError, match=r"Another writer is at work in s3://bucket/.* \(process \d+ on .*\)\. Wait"):
        Lease(store, ".writing")
    first.release()
    first.release()
    assert not first.is_held
    assert names(store) == []
    Lease(store, ".writing").release()


def test_of_many_that_begin_at_once_one_holds_it(store: Store) -> None:
    found: list[Lease] = []
    refused: list[WriteError] = []
    gate = threading.Barrier(8)

    def begin() -> None:
        gate.wait()
        try:
            found.append(Lease(store, ".writing"))
        except WriteError as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(refused)) == (1, 7)
    found[0].release()


def test_a_process_of_this_machine_that_has_ended_is_seen_at_once(store: Store) -> None:
    first = Lease(store, ".writing")
    about = json.loads(store.read_object(".writing/lock-0.json")[0])
    first.release()
    put_lock(store, **{**about, "started": about["started"] - 1})  # its id belongs to another process now
    began = time.monotonic()
    second = Lease(store, ".writing", expiry_seconds=1e6)
    assert time.monotonic() - began < 1e6
    assert names(store) == [".writing/lock-1.json"]
    second.release()


def test_a_lock_of_another_machine_that_is_not_renewed_is_taken_over(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    put_lock(store, 3)
    taken = Lease(store, ".writing", expiry_seconds=0.4)
    assert "A writer on node7 has locked" in caplog.text
    assert names(store) == [".writing/lock-4.json"]
    taken.release()


def test_a_lock_of_another_machine_that_is_renewed_is_not(store: Store) -> None:
    stop = threading.Event()

    def renew() -> None:
        number = 0
        while not stop.wait(0.2):
            number += 1
            put_lock(store, renewals=number)

    put_lock(store)
    renewer = threading.Thread(target=renew)
    renewer.start()
    try:
        with pytest.raises(WriteError, match=r"process 7 on node7"):
            Lease(store, ".writing", expiry_seconds=20.0)
    finally:
        stop.set()
        renewer.join()


def test_a_lock_that_disappears_meanwhile_is_free(store: Store) -> None:
    put_lock(store)
    remover = threading.Timer(0.2, store.remove, [".writing/lock-0.json"])
    remover.start()
    taken = Lease(store, ".writing", expiry_seconds=1e3)
    remover.join()
    taken.release()


def test_the_holder_renews_its_lock(store: Store) -> None:
    held = Lease(store, ".writing", expiry_seconds=0.4)
    counts: set[int] = set()
    while len(counts) < 3:
        with suppress(MissingObjectError):  # this server has none for a moment while it is replaced
            counts.add(json.loads(store.read_object(".writing/lock-0.json")[0])["renewals"])
        time.sleep(0.02)
    held.check()
    held.release()


class FailingStore:
    """A store whose lists fail in a way that nobody expected, as often as they are told to."""

    def __init__(self, store: Store) -> None:
        self._store, self.n_failures = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if self.n_failures:
            self.n_failures -= 1
            raise RuntimeError("no more threads")
        return self._store.list_objects(prefix)


def test_a_renewal_that_fails_is_tried_again_whatever_it_failed_with(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingStore(store)
    held = Lease(failing, ".writing", expiry_seconds=0.4)
    failing.n_failures = 2
    assert eventually(lambda: failing.n_failures == 0)
    renewed = held._renewed
    assert eventually(lambda: held._renewed > renewed)
    held.release()
    assert "could not be renewed: no more threads" in caplog.text


def test_a_holder_that_was_asleep_notices_that_another_has_taken_over(store: Store) -> None:
    held = Lease(store, ".writing", expiry_seconds=1e3)
    held._expiry = 0.0  # as if it had not been renewed for long
    held.check()  # nobody has taken over
    put_lock(store, 1)
    with pytest.raises(WriteError, match=r"Another writer has taken over s3://bucket/"):
        held.check()
    held.release()


def test_what_is_no_lock_of_ours_is_watched_like_any(store: Store) -> None:
    store.put(".writing/lock-0.json", b"nonsense")
    Lease(store, ".writing", expiry_seconds=0.2).release()
