"""Requests that fail: repeated until they succeed, or one error that says all. Each fault is that of a real server."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint, s3_keys

from penstock import OptionError, ReadError, WriteError
from penstock.files.stores.errors import ReplacedObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import Store, open_store
from penstock.files.stores.url import Url

NUMBERS = np.arange(100_000, dtype="<u4").tobytes()
"""Each four bytes are their own position."""

PASSING: dict[str, tuple[dict[str, Any], str]] = {
    "500": ({"kind": "status", "status": 500, "code": "InternalError"}, "the server answered 500 .*InternalError"),
    "503": ({"kind": "status", "status": 503, "code": "SlowDown", "retry_after": 1}, "answered 503 .*SlowDown"),
    "429": ({"kind": "status", "status": 429, "retry_after": 1}, "the server answered 429 Too Many Requests"),
    "408": ({"kind": "status", "status": 408}, "the server answered 408"),
    "400": ({"kind": "status", "status": 400, "code": "RequestTimeout"}, "answered 400 .*RequestTimeout"),
    "drop": ({"kind": "drop"}, "the connection was closed early|connection reset"),
    "reset": ({"kind": "reset"}, "connection reset|ended early|closed early"),
    "short": ({"kind": "short"}, "the body ended early"),
    "cut": ({"kind": "wrong_length", "by": -1000}, r"7,000 bytes came instead of 8,000"),
    "long": ({"kind": "wrong_length", "by": 1000}, r"9,000 bytes came instead of 8,000"),
}
"""Faults that may pass, and what is said of them."""


@pytest.fixture(params=["s3", "http"])
def server(request: pytest.FixtureRequest) -> Endpoint:
    found: Endpoint = request.getfixturevalue("s3" if request.param == "s3" else "http_files")
    (found.folder / "x").write_bytes(NUMBERS)
    return found


def read(store: Store, begin: int = 4000, n_bytes: int = 8000, version: str | None = None) -> bytes:
    return bytes(store.read_range("x", begin, n_bytes, version=version))


def open_with(server: Endpoint, **changes: Any) -> Store:
    """Return the store with other options, so that counts begin at zero."""
    return open_store(server.url, replace(server.options, **changes))


@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_are_not_noticed(server: Endpoint, fault: str) -> None:
    store = open_with(server, deadline_seconds=61.0)
    server.break_requests({**PASSING[fault][0], "method": "GET", "times": 2})
    assert read(store) == NUMBERS[4000:12000]
    assert (store.counts.requests, store.counts.retries, store.counts.bytes_read) == (3, 2, 8000)
    assert [row[:2] for row in server.log()] == [("GET", "x")] * 3


@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_stay_are_one_error_that_says_all(server: Endpoint, fault: str) -> None:
    store = open_with(server, retries=1, deadline_seconds=60.0)
    server.break_requests({**PASSING[fault][0], "method": "GET"})
    with pytest.raises(ReadError) as caught:
        read(store)
    said = str(caught.value)
    where = rf"Could not read bytes 4000–11999 of {re.escape(str(server.url))}/x: 2 attempts in \d+\.\d s, "
    assert re.fullmatch(f"{where}the last one failed: .*({PASSING[fault][1]}).*", said), said
    assert "\n" not in said
    assert store.counts.requests == 2


@pytest.mark.parametrize(
    "fault",
    [{"kind": "status", "status": 500}, {"kind": "reset"}, {"kind": "short"}, {"kind": "wrong_length", "by": -9}],
)
def test_whole_objects_and_lists_are_repeated_too(s3: Endpoint, fault: dict[str, Any]) -> None:
    for name in ("x", "y/z"):
        (s3.folder / name).parent.mkdir(exist_ok=True)
        (s3.folder / name).write_bytes(NUMBERS)
    store = open_with(s3, deadline_seconds=62.0)
    s3.break_requests({**fault, "method": "GET", "times": 1})
    assert store.read_object("x")[0] == NUMBERS
    s3.break_requests({**fault, "method": "LIST", "times": 1})
    assert sorted((info.key, info.n_bytes) for info in store.list_objects()) == [("x", 400_000), ("y/z", 400_000)]
    s3.break_requests({"kind": "status", "status": 500, "times": 1})
    assert store.describe("x").n_bytes == 400_000
    assert store.counts.retries == 3


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"status": 403, "code": "AccessDenied"}, r"403 Forbidden \(AccessDenied: as asked\); check the credentials"),
        ({"status": 400, "code": "InvalidArgument"}, r"400 Bad Request \(InvalidArgument: as asked\)"),
        ({"status": 501}, "501 Not Implemented"),
    ],
)
def test_what_would_fail_again_is_not_repeated(s3: Endpoint, store: Store, rule: dict[str, Any], said: str) -> None:
    (s3.folder / "x").write_bytes(NUMBERS)
    s3.break_requests({"kind": "status", **rule})
    with pytest.raises(ReadError, match=rf"{s3.url}/x: the server answered {said}"):
        read(store)
    with pytest.raises(ReadError, match=rf"{s3.url}/x: the server answered {said}"):
        store.read_object("x")
    assert len(s3.log()) == 2


def test_an_object_that_is_replaced_meanwhile_is_never_mixed(server: Endpoint) -> None:
    store = open_with(server, deadline_seconds=63.0)
    version = store.describe("x").version
    assert read(store, version=version) == NUMBERS[4000:12000]
    server.break_requests({"kind": "replace", "method": "GET", "content": NUMBERS[::-1].hex(), "times": 1})
    server.reset_counts()
    with pytest.raises(
        ReplacedObjectError, match=r"bytes 4000–11999 of .*/x: it was replaced: version .* then, .* now"
    ):
        read(store, version=version)
    assert len(server.log()) == 1
    assert read(store) == NUMBERS[::-1][4000:12000]


def test_a_server_that_is_not_there_is_an_error(s3: Endpoint) -> None:
    options = replace(s3.options, endpoint="http://no-such-server.invalid", retries=1)
    with pytest.raises(ReadError, match=r"2 attempts in .*: the name of the server could not be resolved \(DNS\)"):
        open_store(s3.url, options).describe("x")
    with pytest.raises(ReadError, match=r"2 attempts in .*: connection refused"):
        open_store(s3.url, replace(s3.options, endpoint="http://127.0.0.1:9", retries=1)).describe("x")


# -- credentials -------------------------------------------------------------------------------------------------------


def test_credentials_that_expire_are_asked_for_again(s3: Endpoint) -> None:
    (s3.folder / "x").write_bytes(NUMBERS)
    asked: list[int] = []

    def provide() -> dict[str, str]:
        asked.append(len(asked))
        return s3_keys()

    store = open_with(s3, credentials=provide)
    read(store)
    s3.break_requests({"kind": "status", "status": 403, "code": "ExpiredToken", "times": 1})
    assert read(store) == NUMBERS[4000:12000]
    assert asked == [0, 1]
    s3.break_requests({"kind": "status", "status": 400, "code": "ExpiredToken"})
    with pytest.raises(ReadError, match=r"3 attempts in .*: the credentials have expired \(ExpiredToken\)"):
        read(open_with(s3, credentials=provide, retries=2))


def test_credentials_that_expire_without_a_provider_are_an_error_at_once(
    s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(s3.url, StoreOptions(deadline_seconds=64.0))
    s3.break_requests({"kind": "status", "status": 403, "code": "ExpiredToken"})
    with pytest.raises(
        ReadError, match=r"the credentials have expired .* Renew them .*StoreOptions\(credentials="
    ) as error:
        read(store)
    assert len(s3.log()) == 1
    assert "penstocksecret" not in str(error.value)


def test_credentials_that_fail_to_come_are_an_error(s3: Endpoint) -> None:
    def provide() -> dict[str, str]:
        raise RuntimeError("the vault is closed")

    with pytest.raises(
        OptionError, match=r"credentials of s3://bucket could not be got: RuntimeError: the vault is closed"
    ):
        read(open_with(s3, credentials=provide))


def test_wrong_credentials_are_named_without_them(s3: Endpoint) -> None:
    keys = {"access_key_id": "penstockkey", "secret_access_key": "anothersecret"}
    with pytest.raises(ReadError, match="check the credentials and their permissions") as caught:
        read(open_with(s3, credentials=lambda: keys))
    assert "penstockkey" not in str(caught.value)
    assert "anothersecret" not in str(caught.value)


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "503", "drop"])
def test_an_object_is_put_again_if_that_failed(s3: Endpoint, fault: str) -> None:
    store = open_with(s3, deadline_seconds=65.0)
    s3.break_requests({**PASSING[fault][0], "method": "PUT", "times": 1})
    assert store.put("x", NUMBERS)
    assert (s3.folder / "x").read_bytes() == NUMBERS
    s3.break_requests({**PASSING[fault][0], "method": "PUT"})
    with pytest.raises(WriteError, match=f"Could not write {s3.url}/y: 2 attempts in .*, the last one failed: "):
        open_with(s3, retries=1).put("y", NUMBERS)


def test_an_object_whose_answer_was_lost_counts_as_put(s3: Endpoint) -> None:
    store = open_with(s3, deadline_seconds=66.0)
    s3.break_requests({"kind": "lost", "method": "PUT", "times": 1})
    assert store.put("mine", b"writer 7", if_absent=True)
    assert [row[0] for row in s3.log() if row[1] == "mine"] == ["HEAD", "PUT", "PUT", "GET"]
    s3.break_requests({"kind": "lost", "method": "PUT", "times": 1})
    (s3.folder / "theirs").write_bytes(b"writer 8")
    assert not store.put("theirs", b"writer 7", if_absent=True)


def test_of_many_writers_one_is_first(s3: Endpoint) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = open_with(s3, deadline_seconds=67.0)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: store.put("lock", b"%d" % n, if_absent=True), range(8)))
    assert sum(done) == 1
    assert store.read_object("lock")[0] == b"%d" % done.index(True)


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop"])
def test_parts_of_an_upload_are_sent_again(s3: Endpoint, tmp_path: Path, fault: str) -> None:
    content = np.arange(10_000_000, dtype="<u4").tobytes()
    store = open_with(s3, deadline_seconds=68.0)
    s3.break_requests({**PASSING[fault][0], "method": "PUT", "times": 2})
    (tmp_path / "staged").write_bytes(content)
    assert store.put_file("x", tmp_path / "staged").n_bytes == len(content)
    assert (s3.folder / "x").read_bytes() == content


def test_an_upload_that_fails_names_what_was_lost(s3: Endpoint, tmp_path: Path) -> None:
    s3.break_requests({"kind": "status", "status": 500, "method": "PUT"})
    (tmp_path / "staged").write_bytes(bytes(60_000_000))
    said = rf"Could not write {s3.url}/x: 60,000,000 bytes, after .* s: the server answered 500"
    with pytest.raises(WriteError, match=said):
        open_with(s3, retries=0).put_file("x", tmp_path / "staged")
    assert not (s3.folder / "x").exists()


def test_deadlines_and_retries_hold_for_all_methods(s3: Endpoint) -> None:
    s3.break_requests({"kind": "status", "status": 500})
    store = open_with(s3, retries=0)
    calls: list[Callable[[], Any]] = [
        lambda: store.describe("x"),
        lambda: store.read_object("x"),
        lambda: list(store.list_objects()),
        lambda: store.put("x", b""),
        lambda: store.put("x", b"", if_absent=True),
        lambda: store.put_file("x", Path(__file__)),
    ]
    for call in calls:
        with pytest.raises((ReadError, WriteError), match=rf"Could not .* {s3.url}.*: 1 attempt in .*500"):
            call()


def test_a_web_server_that_ignores_ranges_is_refused(http_files: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    (http_files.folder / "x").write_bytes(NUMBERS)
    http_files.break_requests({"kind": "whole"})
    store = open_store(Url(str(http_files.url)))
    with pytest.raises(ReadError, match="the server sends no parts of files"):
        read(store)
    assert store.read_object("x")[0] == NUMBERS
