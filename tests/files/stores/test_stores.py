"""What a store reads, lists and writes, for each kind of URL."""

import os
import pickle
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from penstock_remote import Endpoint

from penstock import OptionError, ReadError
from penstock.files.stores.errors import MissingObjectError, ReplacedObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import PIECE_BYTES, Store, open_store
from penstock.files.stores.url import Url
from penstock.files.unnamed import find_path

NUMBERS = np.arange(300_000, dtype="<u4").tobytes()
"""Each four bytes are their own position."""


@pytest.fixture(params=["s3", "file"])
def writable(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        s3: Endpoint = request.getfixturevalue("s3")
        return open_store(s3.url, s3.options)
    return open_store(Url(tmp_path.as_uri()))


def read(store: Store, key: str, begin: int, n_bytes: int, version: str | None = None) -> bytes:
    return bytes(store.read_range(key, begin, n_bytes, version=version))


def test_what_was_put_is_read_described_and_listed(writable: Store) -> None:
    for key in ("numbers", "below/a b+%&é.bin", "below/deep/empty"):
        assert writable.put(key, b"" if key.endswith("empty") else NUMBERS)
    info = writable.describe("below/a b+%&é.bin")
    assert (info.key, info.n_bytes) == ("below/a b+%&é.bin", len(NUMBERS))
    assert read(writable, "below/a b+%&é.bin", 4004, 40, info.version) == NUMBERS[4004:4044]
    assert writable.read_object("below/a b+%&é.bin") == (NUMBERS, info)
    assert writable.read_object("below/deep/empty")[0] == b""
    read(writable, "numbers", 0, 0)
    names = ["below/a b+%&é.bin", "below/deep/empty", "numbers"]
    assert sorted(found.key for found in writable.list_objects()) == names
    assert sorted(found.key for found in writable.list_objects("below")) == names[:2]
    assert info in list(writable.list_objects("below"))
    assert list(writable.list_objects("nothing")) == []


def test_the_object_at_the_url_itself_has_an_empty_key(writable: Store) -> None:
    writable.put("numbers", NUMBERS)
    options = getattr(writable, "_options")  # noqa: B009
    one = open_store(writable.url / "numbers", options)
    assert one.describe("").n_bytes == len(NUMBERS)
    assert read(one, "", 400, 4) == NUMBERS[400:404]
    assert one.read_object("")[0] == NUMBERS


def test_what_is_not_there_is_missing(writable: Store) -> None:
    with pytest.raises(MissingObjectError, match=f"{writable.url}/x: there is no such object"):
        writable.describe("x")
    with pytest.raises(FileNotFoundError):
        read(writable, "x", 0, 4)
    with pytest.raises(ReadError):
        writable.read_object("x")
    writable.remove("x")


def test_an_object_is_replaced_only_on_request(writable: Store) -> None:
    assert writable.put("x", b"first", if_absent=True)
    assert not writable.put("x", b"second", if_absent=True)
    assert writable.read_object("x")[0] == b"first"
    assert writable.put("x", b"third")
    assert writable.read_object("x")[0] == b"third"
    writable.remove("x")
    assert writable.put("x", b"fourth", if_absent=True)


def test_a_pinned_version_is_another_after_a_change(writable: Store) -> None:
    writable.put("x", NUMBERS)
    pinned = writable.describe("x").version
    assert pinned is not None
    writable.remove("x")
    writable.put("x", NUMBERS[::-1])
    before = writable.counts.requests
    with pytest.raises(ReplacedObjectError, match=rf"bytes 4–7 of {writable.url}/x: it was replaced: version"):
        read(writable, "x", 4, 4, pinned)
    with pytest.raises(ReplacedObjectError):
        writable.read_object("x", version=pinned)
    assert writable.counts.requests == before + 2


def test_a_bucket_is_no_object(s3: Endpoint) -> None:
    bucket = open_store(Url("s3://bucket"), s3.options)
    with pytest.raises(MissingObjectError, match="s3://bucket: it is a bucket or a server, and no object"):
        bucket.describe("")
    with pytest.raises(OptionError, match="must name an object, got the bucket or server s3://bucket"):
        bucket.put("", b"x")
    with pytest.raises(OptionError, match=r"none of them empty, `\.` or `\.\.`"):
        bucket.describe("a//b")
    assert s3.log() == []


def test_bytes_after_the_end_are_no_bytes(writable: Store) -> None:
    writable.put("x", b"1234")
    for begin in (2, 4, 100):
        with pytest.raises(ReadError, match=f"bytes {begin}–{begin + 3} of "):
            read(writable, "x", begin, 4)


@pytest.mark.parametrize("n_bytes", [0, 100_000, (1 << 23) + 77, 20_000_000])
def test_the_content_of_a_file_is_written(writable: Store, tmp_path: Path, n_bytes: int) -> None:
    content = np.arange(n_bytes // 4 + 1, dtype="<u4").tobytes()[:n_bytes]
    (tmp_path / "staged").write_bytes(content)
    info = writable.put_file("below/x", tmp_path / "staged")
    assert (info.key, info.n_bytes) == ("below/x", n_bytes)
    assert read(writable, "below/x", 0, n_bytes, info.version) == content
    assert writable.counts.bytes_written == n_bytes


def test_a_file_without_a_name_is_written(writable: Store) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(NUMBERS)
        file.seek(0)
        assert writable.put_file("x", find_path(file.fileno())).n_bytes == len(NUMBERS)
    assert writable.read_object("x")[0] == NUMBERS


def test_a_folder_lists_its_folders_and_objects_and_nothing_below_them(writable: Store) -> None:
    for key in ("a", "below/b", "below/deep/c", "other/d"):
        writable.put(key, b"1234")
    assert writable.list_folder() == (["below", "other"], [writable.describe("a")])
    assert writable.list_folder("below") == (["deep"], [writable.describe("below/b")])


@pytest.mark.canary("server")
def test_files_behind_a_web_server_are_read(http_files: Endpoint) -> None:
    (http_files.folder / "a b%.bin").write_bytes(NUMBERS)
    store = open_store(http_files.url)
    info = store.describe("a b%.bin")
    assert read(store, "a b%.bin", 4004, 40, info.version) == NUMBERS[4004:4044]
    assert store.read_object("a b%.bin") == (NUMBERS, info)
    assert open_store(http_files.url / "a b%.bin").read_object("")[0] == NUMBERS
    with pytest.raises(MissingObjectError):
        store.describe("nothing")
    with pytest.raises(ReadError, match=f"Could not list {http_files.url}: the server"):
        list(store.list_objects())


def test_a_large_range_comes_in_pieces_that_are_under_way_at_once(s3: Endpoint) -> None:
    n_bytes = 3 * PIECE_BYTES + 5000
    numbers = np.arange(n_bytes // 4 + 1, dtype="<u4").tobytes()
    (s3.folder / "large").write_bytes(numbers)
    store = open_store(s3.url, s3.options)
    version = store.describe("large").version
    s3.set_line(latency_seconds=0.1)
    s3.reset_counts()
    assert store.read_range("large", 3, n_bytes - 3, version=version) == numbers[3:n_bytes]
    assert s3.n_requests("GET") == 4
    assert s3.most_in_flight() > 1
    with pytest.raises(ReplacedObjectError):
        store.read_range("large", 0, n_bytes, version="another")


def test_many_threads_share_a_limited_number_of_connections(s3: Endpoint) -> None:
    (s3.folder / "x").write_bytes(NUMBERS)
    store = open_store(s3.url, replace(s3.options, connections=3))
    s3.set_line(latency_seconds=0.1)
    wrong: list[int] = []
    together = threading.Barrier(8)

    def check(item: int) -> None:
        positions = range(item, 300_000, 100_000)
        together.wait()
        wrong.extend(at for at in positions if read(store, "x", 4 * at, 4) != at.to_bytes(4, "little"))

    threads = [threading.Thread(target=check, args=(item,)) for item in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 < s3.most_in_flight() <= 3
    n = sum(len(range(item, 300_000, 100_000)) for item in range(8))
    counts = store.counts
    assert (counts.requests, counts.retries, counts.bytes_read) == (n, 0, 4 * n)
    assert counts.seconds > 0.1 * n


def test_the_same_url_has_one_store(s3: Endpoint) -> None:
    assert open_store(s3.url, s3.options) is open_store(Url(f"{s3.url}/"), s3.options)
    assert open_store(s3.url, s3.options) is not open_store(s3.url)


def test_options_are_checked_and_show_no_secret() -> None:
    with pytest.raises(OptionError, match=r"endpoint must begin with http:// or https://, got 'localhost:9000'"):
        StoreOptions(endpoint="localhost:9000")
    with pytest.raises(OptionError, match="credentials must be a function"):
        StoreOptions(credentials={"access_key_id": "secret"})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="exclude each other"):
        StoreOptions(credentials=dict, anonymous=True)
    with pytest.raises(OptionError, match="deadline_seconds must be a number > 0, got 0"):
        StoreOptions(deadline_seconds=0)
    with pytest.raises(OptionError, match="retries must be an integer >= 0, got -1"):
        StoreOptions(retries=-1)
    with pytest.raises(OptionError, match="connections must be an integer >= 1, got 0"):
        StoreOptions(connections=0)
    assert "dict" not in repr(StoreOptions(credentials=dict))
    options = StoreOptions(region="x", credentials=dict)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("http://localhost/x", StoreOptions(endpoint="http://localhost"), "endpoint is no option of http:// URLs"),
        ("gs://bucket/x", StoreOptions(region="x"), "region is an option of s3:// URLs"),
        ("file:///x", StoreOptions(endpoint="http://localhost"), "no options of file:// URLs"),
        (
            "sftp://x",
            StoreOptions(),
            "Could not open sftp://x: its scheme must be one of s3, .* and hf, got sftp. Copy",
        ),
        ("s3://bucket", StoreOptions(credentials=lambda: 7), "credentials must return a mapping"),  # type: ignore[arg-type,return-value]
        ("s3://bucket", StoreOptions(credentials=lambda: {}["x"]), "could not be got: KeyError"),
    ],
)
def test_options_that_do_not_fit_the_url_are_refused(url: str, options: StoreOptions, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        open_store(Url(url), options).describe("x")


def test_a_fifo_behind_a_file_url_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ReadError, match="regular file"):
        open_store(Url(tmp_path.as_uri())).read_object("x")
