"""A cache folder that is full, deleted under us, damaged, or shared by four processes: right bytes always."""

import itertools
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from penstock_remote import Endpoint
from penstock_remote_sets import RemoteSet, digest_batch, digests_of, folder_bytes, make_plan, watch_folder, write_set
from penstock_test_mounts import enter_mount_namespace, mount_tmpfs, set_read_only
from penstock_test_parts import run_isolated, run_side_by_side

from penstock import Loader, RunOptions, Shuffle, WindowShuffle

ORDERS = {"items": Shuffle(), "windows": WindowShuffle(2)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, s3_server: Endpoint) -> RemoteSet:
    return write_set(tmp_path_factory.mktemp("harmed"), s3=s3_server.below("harmed"))


@pytest.fixture
def shards(written: RemoteSet, tmp_path: Path, s3_server: Endpoint) -> RemoteSet:
    s3_server.reset()
    return written.copy(tmp_path).with_cache(0.6)


@pytest.fixture(scope="module")
def expected(written: RemoteSet) -> dict[str, list[Any]]:
    return {name: digests_of(make_loader(written, "local", name), 3) for name in ORDERS}


def make_loader(shards: RemoteSet, place: str, order: str, workers: int = 0, options: Any = None) -> Loader:
    source = shards.open(place)
    return Loader(source, make_plan(source, ORDERS[order]), num_workers=workers, options=options)


def list_spans(cache: Path) -> list[Path]:
    """Return the files of a cache that hold spans."""
    return [path for path in cache.glob("*/*") if path.is_file() and path.parent.name != "locks"]


def truncate(cache: Path) -> None:
    for path in list_spans(cache):
        with suppress(FileNotFoundError):  # evicted meanwhile
            os.truncate(path, path.stat().st_size // 2)


def empty(cache: Path) -> None:
    for path in list_spans(cache):
        with suppress(FileNotFoundError):
            os.truncate(path, 0)


def flip(cache: Path) -> None:
    for number, path in enumerate(list_spans(cache)):
        with suppress(FileNotFoundError), path.open("r+b") as file:
            place = (37 * number) % max(1, path.stat().st_size)
            file.seek(place)
            byte = file.read(1) or b"?"
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))


def swap(cache: Path) -> None:
    """Give each span the file of another one, of the same size if there is one."""
    with suppress(FileNotFoundError):
        spans = sorted(list_spans(cache), key=lambda path: (path.stat().st_size, path))
        (cache / "first").write_bytes(spans[0].read_bytes())
        for path, other in itertools.pairwise(spans):
            other.replace(path)
        (cache / "first").replace(spans[-1])


def fill_with_garbage(cache: Path) -> None:
    for path in list_spans(cache):
        with suppress(FileNotFoundError):
            path.write_bytes(os.urandom(path.stat().st_size))
    (cache / ("0" * 32)).mkdir(exist_ok=True, parents=True)
    (cache / "ledger").write_bytes(b"garbage")


def delete(cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)


def replace_by_a_file(cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    with suppress(IsADirectoryError):  # a download has made it again
        cache.write_bytes(b"not a folder")


HARMS: dict[str, Callable[[Path], None]] = {
    harm.__name__: harm for harm in (truncate, empty, flip, swap, fill_with_garbage, delete, replace_by_a_file)
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_folder_that_is_harmed_while_it_is_used_changes_no_batch(
    harm: Callable[[Path], None], order: str, shards: RemoteSet, expected: dict[str, list[Any]]
) -> None:
    found: list[Any] = []
    with make_loader(shards, "s3 cached", order, 2, RunOptions(executor="threads")) as loader:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                found.append(digest_batch(batch))
                if number in (2, 9):
                    harm(shards.cache)
            assert loader.epoch == epoch + 1
    assert found == expected[order]


@pytest.mark.parametrize("harm", [truncate, flip, swap, fill_with_garbage, delete], ids=lambda harm: harm.__name__)
def test_a_folder_that_was_harmed_before_a_run_is_mended(
    harm: Callable[[Path], None], shards: RemoteSet, expected: dict[str, list[Any]]
) -> None:
    shards = shards.with_cache(1.2)
    for _ in range(2):
        with make_loader(shards, "s3 cached", "items") as loader:
            assert digests_of(loader, 3) == expected["items"]
        harm(shards.cache)
    with make_loader(shards, "s3 cached", "items") as loader:
        digests_of(loader, 1)
        shards.downloaded()
        assert digests_of(loader, 3) == expected["items"][len(expected["items"]) // 3 :]
    assert shards.downloaded() == 0.0


# -- full --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [1, 1000, 300_000])
def test_a_cache_without_room_is_bypassed(cache_bytes: int, shards: RemoteSet, expected: dict[str, list[Any]]) -> None:
    small = shards.with_bytes(cache_bytes)
    with watch_folder(shards.cache) as most, make_loader(small, "s3 cached", "windows") as loader:
        assert digests_of(loader, 3) == expected["windows"]
    assert sum(path.stat().st_size for path in list_spans(shards.cache)) <= cache_bytes
    assert most[1] > 0


def read_on_a_full_disk(shards: RemoteSet, expected: list[Any]) -> str:
    refused = enter_mount_namespace()
    if refused is not None:
        return refused
    shards.cache.mkdir()
    mount_tmpfs(shards.cache, "size=400k")  # the cache may hold more than the disk
    with make_loader(shards, "s3 cached", "windows") as loader:
        assert digests_of(loader, 3) == expected
    assert 0 < folder_bytes(shards.cache) <= 400 << 10
    mount_tmpfs(shards.cache, "size=4m,nr_inodes=8")
    with make_loader(shards, "s3 cached", "windows") as loader:
        assert digests_of(loader, 3) == expected
    return ""


def test_a_disk_that_is_full_is_bypassed(shards: RemoteSet, expected: dict[str, list[Any]]) -> None:
    refused = run_isolated(read_on_a_full_disk, shards, expected["windows"])
    if refused:
        pytest.skip(refused)


def read_on_a_disk_that_becomes_read_only(shards: RemoteSet, expected: list[Any]) -> str:
    refused = enter_mount_namespace()
    if refused is not None:
        return refused
    shards.cache.mkdir()
    mount_tmpfs(shards.cache, "size=8m")
    with make_loader(shards, "s3 cached", "windows") as loader:
        first = digests_of(loader, 1)
        set_read_only(shards.cache)
        assert first + digests_of(loader, 3) == expected
    with make_loader(shards, "s3 cached", "windows") as loader:  # what is there can still be used
        shards.downloaded()
        assert digests_of(loader, 3) == expected
    assert shards.downloaded() < 2.5
    return ""


def test_a_disk_that_becomes_read_only_is_bypassed(shards: RemoteSet, expected: dict[str, list[Any]]) -> None:
    refused = run_isolated(read_on_a_disk_that_becomes_read_only, shards, expected["windows"])
    if refused:
        pytest.skip(refused)


# -- shared ------------------------------------------------------------------------------------------------------------


def read_beside_others(shards: RemoteSet, number: int) -> list[Any]:
    """Read three epochs, and harm the folder now and then."""
    rng, found = random.Random(number), []
    harms = [truncate, flip, empty, delete]
    with make_loader(shards, "s3 cached", "items" if number % 2 else "windows") as loader:
        while loader.epoch < 3:
            for batch in loader:
                found.append(digest_batch(batch))
                if rng.random() < 0.1:
                    with suppress(OSError):  # another process was there first
                        rng.choice(harms)(shards.cache)
    return found


def test_four_processes_share_a_folder_that_each_of_them_harms(
    shards: RemoteSet, expected: dict[str, list[Any]]
) -> None:
    found = run_side_by_side(*((read_beside_others, shards, number) for number in range(4)))
    for number, batches in enumerate(found):
        assert batches == expected["items" if number % 2 else "windows"]


def read_three_epochs(shards: RemoteSet, order: str) -> list[Any]:
    with make_loader(shards, "s3 cached", order) as loader:
        return digests_of(loader, 3)


def test_four_processes_share_a_folder_of_everything_and_download_it_once(
    shards: RemoteSet, expected: dict[str, list[Any]]
) -> None:
    shards = shards.with_cache(1.2)
    found = run_side_by_side(*((read_three_epochs, shards, "windows") for _ in range(4)))
    assert found == [expected["windows"]] * 4
    assert shards.downloaded() <= 1.1


def test_processes_with_different_limits_share_a_folder(shards: RemoteSet, expected: dict[str, list[Any]]) -> None:
    large = shards.with_cache(0.9)
    with watch_folder(shards.cache) as most:
        found = run_side_by_side(
            *((read_three_epochs, each, "windows") for each in (shards.with_cache(0.3), large)), seconds=200
        )
    assert found == [expected["windows"]] * 2
    assert large.cache_bytes is not None
    assert 0 < most[0] <= large.cache_bytes
