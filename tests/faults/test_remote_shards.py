"""Damage of shards at a URL: the error of a damaged folder, which names shard and item; never wrong bytes."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import penstock_test_shards
import pytest
from penstock_faulty_store import serve_folder
from penstock_remote import Endpoint
from penstock_test_shards import ALL, SECOND, damage_of, facts, flip_member, read_quarantine

from penstock import DamageError, ReadError, TarSource, create_shards_from_arrays
from penstock.files.spans.folder import CacheFolder
from penstock.files.spans.span import StoredSpan
from penstock.files.stores.options import StoreOptions
from penstock.shard.index_tars import index_archives

originals, folder, packed = penstock_test_shards.originals, penstock_test_shards.folder, penstock_test_shards.packed


@pytest.fixture
def there(folder: Path, s3: Endpoint, tmp_path: Path) -> Endpoint:
    """Six items in three shards at a URL, to be damaged."""
    found = s3.below(tmp_path.name)
    shutil.copytree(folder, found.folder, dirs_exist_ok=True)
    return found


def open_there(there: Endpoint, **options: object) -> TarSource:
    return TarSource(str(there.url), store=there.options, **options)  # type: ignore[arg-type]


def test_a_shard_that_is_missing_is_noticed_when_the_source_is_made(there: Endpoint) -> None:
    (there.folder / SECOND).unlink()
    with pytest.raises(DamageError, match=rf"{SECOND}: the shard is missing from {there.url}"):
        open_there(there)
    for shard in there.folder.glob("*.tar"):
        shard.unlink()
    with pytest.raises(DamageError, match=rf"the shard and 2 more are missing from {there.url}"):
        open_there(there)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_web_server_lists_nothing_so_a_missing_shard_is_noticed_by_its_reader(
    status: int, folder: Path, http_files: Endpoint, tmp_path: Path
) -> None:
    web = http_files.below(tmp_path.name)
    shutil.copytree(folder, web.folder, dirs_exist_ok=True)
    (web.folder / SECOND).unlink()
    http_files.break_requests({"kind": "status", "status": status, "method": "PROPFIND"})
    source = TarSource(str(web.url))
    assert facts(source.take(ALL[[0, 1, 4, 5]])) == [0, 1, 4, 5]
    error = damage_of(source)
    assert (error.shard, error.item) == (SECOND, 2)
    assert "could not be opened" in error.reason


def test_the_shard_that_fails_is_named_though_another_name_is_within_its_own(tmp_path: Path) -> None:
    for name in ("1.tar", "11.tar"):
        create_shards_from_arrays(tmp_path / "written" / name, {"x": np.arange(3)})
        shutil.copy(tmp_path / "written" / name / "shard_000000.tar", tmp_path / name)
    index_archives(tmp_path)
    with serve_folder(tmp_path) as server:
        source = TarSource(server.url, store=StoreOptions(retries=0))
        source.take(np.array([0, 4, 5]))
        source.close()
        server.fault = lambda path: 403 if path.endswith("/11.tar") else None
        with pytest.raises(ReadError, match=r"Could not read item 4 in 11\.tar: .*/11\.tar: the server answered 403"):
            source.take(np.array([0, 4, 5]))


@pytest.mark.parametrize("name", ["dataset_metadata.json", f"{SECOND}.index"])
@pytest.mark.parametrize("has_cache", [False, True])
def test_a_server_that_announces_more_than_the_memory_holds_is_an_error_that_names_the_file(
    name: str, has_cache: bool, folder: Path, tmp_path: Path
) -> None:
    options = StoreOptions(retries=0)
    with serve_folder(folder) as server:
        server.fault = lambda path: "huge" if path.endswith(name) else None
        with pytest.raises(ReadError, match=rf"{server.url}/{name}: "):
            TarSource(server.url, store=options, cache=tmp_path / "cache" if has_cache else None).take(ALL)


@pytest.mark.parametrize("by", [-512, 512])
@pytest.mark.parametrize("server", ["s3", "http_files"])
def test_a_shard_of_another_size_is_refused(
    by: int, server: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    there = request.getfixturevalue(server).below(tmp_path.name)
    shutil.copytree(folder, there.folder, dirs_exist_ok=True)
    content = (there.folder / SECOND).read_bytes()
    (there.folder / SECOND).write_bytes(content[:by] if by < 0 else content + bytes(by))
    source = open_there(there)
    error = damage_of(source)
    assert (error.shard, error.item) == (SECOND, 2)
    assert ("truncated: " if by < 0 else "longer than it was written") in error.reason
    assert facts(source.take(ALL[[5, 0]])) == [5, 0]


def test_a_shard_that_is_replaced_after_the_source_was_made_is_refused(there: Endpoint, originals: Path) -> None:
    source = open_there(there)
    assert facts(source.take(ALL[:2])) == [0, 1]
    shutil.copy(originals / "other" / SECOND, there.folder / SECOND)
    error = damage_of(source, [5, 3])
    assert (error.shard, error.item) == (SECOND, 3)
    assert facts(source.take(ALL[[5, 0]])) == [5, 0]


def test_one_bit_that_differs_is_noticed_by_the_item_that_has_it(there: Endpoint) -> None:
    flip_member(there.folder, "sample_000000003.x.npy")
    source = open_there(there)
    error = damage_of(source)
    assert (error.shard, error.item) == (SECOND, 3)
    assert "checksum of 'x.npy'" in error.reason
    assert facts(source.take(ALL[ALL != 3])) == [0, 1, 2, 4, 5]


def test_items_are_verified_whenever_they_come_again(there: Endpoint) -> None:
    """A folder is verified once; what comes over a network may differ the next time."""
    assert facts(open_there(there).take(ALL)) == ALL.tolist()
    flip_member(there.folder, "sample_000000003.x.npy")
    for _ in range(2):
        assert damage_of(open_there(there)).item == 3


def test_damage_that_has_come_into_a_cache_is_downloaded_again(there: Endpoint, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert facts(open_there(there, cache=cache, cache_bytes=1 << 20).take(ALL)) == ALL.tolist()
    spans = [path for path in cache.glob("*/*-*") if not path.name.endswith("-end")]  # of shards
    assert len(spans) == 3
    for path in spans:
        content = np.fromfile(path, np.uint8)[:-16] ^ 1
        path.unlink()
        assert CacheFolder(cache, 1 << 20).add(StoredSpan(path.parent.name, *map(int, path.name.split("-"))), content)
    source = open_there(there, cache=cache, cache_bytes=1 << 20)
    found = []
    for _ in range(10):
        try:
            found = facts(source.take(ALL))
        except DamageError:
            continue
        break
    assert found == ALL.tolist()


@pytest.mark.parametrize("what", ["missing", "damaged", "other"])
def test_a_side_index_that_is_not_the_right_one_is_refused(what: str, there: Endpoint) -> None:
    path = there.folder / f"{SECOND}.index"
    if what == "missing":
        path.unlink()
    elif what == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    else:
        shutil.copy(there.folder / "shard_000000.tar.index", path)
    source = open_there(there)
    error = damage_of(source, [1, 3])
    assert error.item == 3
    assert error.shard.startswith(SECOND)
    assert facts(source.take(ALL[:2])) == [0, 1]


def test_compressed_shards_are_checked_as_in_a_folder(packed: Path, s3: Endpoint, tmp_path: Path) -> None:
    there = s3.below(tmp_path.name)
    shutil.copytree(packed, there.folder, dirs_exist_ok=True)
    source = open_there(there)
    assert facts(source.take(ALL[::-1])) == ALL[::-1].tolist()
    shard = sorted(there.folder.glob("*.tar*"))[0]
    assert not shard.name.endswith(".index")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    error = damage_of(open_there(there))
    assert (error.shard, error.item) == (shard.name, 0)


def test_substitutes_are_those_of_the_folder(there: Endpoint, folder: Path, tmp_path: Path) -> None:
    for place in (there.folder, folder):
        flip_member(place, "sample_000000003.x.npy")
    local = TarSource(folder, on_error="substitute")
    source = open_there(there, on_error="substitute", quarantine=tmp_path / "quarantine.jsonl")
    assert facts(source.take(ALL)) == facts(local.take(ALL))
    assert read_quarantine(tmp_path) == read_quarantine(folder) == [(3, SECOND)]


def test_a_server_that_fails_is_an_error_that_names_shard_and_item(there: Endpoint) -> None:
    quick = replace(there.options, retries=1, deadline_seconds=2.0)
    source = TarSource(str(there.url), store=quick)
    there.break_requests({"kind": "status", "status": 500, "key": SECOND})
    try:
        with pytest.raises(ReadError, match=rf"item 3 in {SECOND}: .*{there.url}") as caught:
            source.take(np.array([0, 3]))
        assert not isinstance(caught.value, DamageError)
    finally:
        there.break_requests()
    assert facts(source.take(ALL)) == ALL.tolist()


def test_a_server_that_is_not_there_is_an_error_that_names_the_url() -> None:
    options = StoreOptions(endpoint="http://127.0.0.1:9", anonymous=True, retries=1, deadline_seconds=2.0)
    with pytest.raises(ReadError, match="s3://bucket/train"):
        TarSource("s3://bucket/train", store=options)
