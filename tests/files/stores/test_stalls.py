"""Servers that say nothing: a request is given up early enough for another one, and the deadline holds."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from penstock_remote import Endpoint

from penstock import ReadError, WriteError
from penstock.files.stores.store import Store, open_store

CONTENT = bytes(range(256)) * 1000
STALLS: dict[str, dict[str, Any]] = {
    "answer": {"kind": "stall", "seconds": 3600},
    "body": {"kind": "stall", "seconds": 3600, "in_body": True},
}


def read(store: Store) -> bytes:
    return bytes(store.read_range("x", 7, 100_000))


@pytest.mark.parametrize("stall", STALLS)
def test_a_request_that_stalls_is_repeated(s3: Endpoint, stall: str) -> None:
    (s3.folder / "x").write_bytes(CONTENT)
    store = open_store(s3.url, replace(s3.options, deadline_seconds=24.0))
    s3.break_requests({**STALLS[stall], "method": "GET", "times": 1})
    assert read(store) == CONTENT[7:100_007]
    assert store.counts.retries == 1


@pytest.mark.parametrize("stall", STALLS)
def test_a_server_that_stalls_for_ever_is_an_error_within_the_deadline(http_files: Endpoint, stall: str) -> None:
    (http_files.folder / "x").write_bytes(CONTENT)
    store = open_store(http_files.url, replace(http_files.options, deadline_seconds=8.0))
    http_files.break_requests({**STALLS[stall], "method": "GET"})
    begin = time.monotonic()
    with pytest.raises(ReadError, match=r"bytes 7–100006 of .*: the server did not answer in time") as caught:
        read(store)
    assert time.monotonic() - begin < 40  # not for ever
    found = re.search(r"(\d) attempts in ([\d.]+) s", str(caught.value))
    assert found is not None
    assert int(found[1]) >= 2


def test_a_server_that_drips_is_an_error_within_the_deadline(http_files: Endpoint) -> None:
    (http_files.folder / "x").write_bytes(CONTENT)
    store = open_store(http_files.url, replace(http_files.options, deadline_seconds=6.0))
    http_files.break_requests({"kind": "drip", "method": "GET", "seconds": 0.05})
    with pytest.raises(ReadError, match=r"attempts in .*: the server did not answer in time"):
        read(store)


def test_a_stall_holds_up_only_its_own_request(s3: Endpoint) -> None:
    (s3.folder / "x").write_bytes(CONTENT)
    (s3.folder / "y").write_bytes(CONTENT)
    store = open_store(s3.url, replace(s3.options, deadline_seconds=16.0))
    s3.break_requests({"kind": "stall", "seconds": 3600, "key": "x", "times": 1})
    done: list[bytes] = []
    thread = threading.Thread(target=lambda: done.append(read(store)))
    thread.start()
    for _ in range(20):
        assert store.read_object("y")[0] == CONTENT
    thread.join()
    assert done == [CONTENT[7:100_007]]


def test_uploads_and_lists_that_stall_end_within_the_deadline(s3: Endpoint, tmp_path: Path) -> None:
    store = open_store(s3.url, replace(s3.options, deadline_seconds=3.0))
    s3.break_requests({"kind": "stall", "seconds": 3600})
    with pytest.raises(ReadError, match="did not answer in time"):
        list(store.list_objects())
    with pytest.raises(WriteError, match="did not answer in time"):
        store.put("x", b"1")
    (tmp_path / "staged").write_bytes(bytes(200_000_000))
    with pytest.raises(WriteError, match="did not answer in time"):
        store.put_file("x", tmp_path / "staged")
