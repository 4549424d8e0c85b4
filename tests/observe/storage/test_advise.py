"""Which order fits a storage: a pure function over figures that were made up."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock import Shuffle, WindowShuffle, create_shards_from_arrays
from penstock.observe.storage import shards
from penstock.observe.storage.advise import OrderAdvice, StoredDataset, advise_order
from penstock.observe.storage.device import Device
from penstock.observe.storage.measure import StorageSpeed
from penstock.observe.storage.shards import describe_shards
from penstock.shard.manifest import Manifest, manifest_path

GB, MB, KB = 10**9, 10**6, 10**3
NVME, DISK, NFS = Device("ext4", "/data", False), Device("xfs", "/data", True), Device("nfs4", "/data")


def speed(device: Device, size: float, sequential: float, alone: float, together: float) -> StorageSpeed:
    return StorageSpeed(device, int(size), sequential, alone, together, n_timed=100)


def items(size: float, total: int = 100 * GB, **more: object) -> StoredDataset:
    """Return items of one size in 20 shards, chunks of 64 as `create_webdataset_dataloader` has them."""
    found = StoredDataset([Path("a.tar")], [int(total / size / 20)] * 20, total, size, 64, int(size))
    return replace(found, **more)  # type: ignore[arg-type]


def advise(found: StorageSpeed, stored: StoredDataset, memory_bytes: int = 16 * GB, **more: int) -> OrderAdvice:
    return advise_order(found, stored, memory_bytes=memory_bytes, **more)


def window_bytes(advice: OrderAdvice, size: float) -> float:
    return (advice.window or 0) * advice.chunk_items * size


@pytest.mark.parametrize(
    ("found", "fraction"),
    [
        (speed(NVME, 295 * KB, 2 * GB, 2500, 6500), "0.96"),
        (speed(NVME, 295 * KB, 520 * MB, 1100, 1700), "0.96"),  # a SATA SSD
        (
            replace(speed(NVME, 295 * KB, 2 * GB, 2500, 8000), device=DISK),
            "1.00",
        ),  # a virtual disk that says it rotates
    ],
)
def test_shuffle_fits_storage_with_fast_random_reads_whatever_the_kernel_calls_it(
    found: StorageSpeed, fraction: str
) -> None:
    advice = advise(found, items(295 * KB))
    assert advice.order == Shuffle()
    assert advice.window is None
    assert advice.mixing > 0.9
    assert advice.reason == f"random reads of an item reach {fraction} of the speed in sequence"


def test_windows_fit_a_rotating_disk_and_their_chunks_are_long_enough_and_fit_in_memory() -> None:
    found = speed(DISK, 295 * KB, 150 * MB, 80, 130)
    advice = advise(found, items(295 * KB))
    assert isinstance(advice.order, WindowShuffle)
    assert advice.order.held
    assert 0.9 <= (found.fraction_of_sequential(advice.chunk_items * 295 * KB) or 0) < 0.92
    assert 0.8 * 256 * MB < window_bytes(advice, 295 * KB) <= 256 << 20
    assert 0.3 < advice.mixing < 0.9
    assert advice.reason == ("random reads of an item reach 0.26 of the speed in sequence, and chunks of 7.96 MB 0.90")


def test_small_items_have_windows_on_nvme_too_and_no_more_of_them_than_mix_better() -> None:
    advice = advise(speed(NVME, KB, 2 * GB, 12_000, 60_000), items(KB))
    assert advice.order == WindowShuffle(512, held=False)  # a seek takes no time
    assert str(advice).startswith("WindowShuffle(window=512, held=False) with chunk_items=292, mixing score ")
    assert advice.mixing > 0.9
    assert window_bytes(advice, KB) < 256 << 20


def test_a_server_gets_windows_of_long_chunks_even_if_it_answered_from_memory() -> None:
    advice = advise(speed(NFS, 295 * KB, 110 * MB, 250, 372), items(295 * KB))
    assert isinstance(advice.order, WindowShuffle)
    assert advice.chunk_items * 295 * KB >= 1 << 20
    assert "others use the server, too" in advice.reason


def test_large_items_need_no_windows_on_a_disk() -> None:
    found = speed(DISK, 1 << 20, 150 * MB, 60, 75)
    assert isinstance(advise(found, items(MB)).order, WindowShuffle)
    assert advise(found, items(8 * MB)).order == Shuffle()


def test_an_unknown_speed_gives_the_windows_of_the_default_and_says_so() -> None:
    found = StorageSpeed(NVME, 1000, unknown="in memory: what was tried is in the page cache")
    advice = advise(found, items(KB))
    assert (advice.order, advice.chunk_items) == (WindowShuffle(16, held=False), 64)
    assert advice.reason == "the speed is unknown, and windows are safe on every disk"
    assert advise(found, items(KB), reach_items=200).order == WindowShuffle(3, held=False)
    assert advise(found, items(KB, 900 * KB), reach_items=1000).order == Shuffle()


def test_files_in_memory_are_shuffled() -> None:
    found = StorageSpeed(Device("tmpfs", "/dev/shm"), 1000, unknown="in memory: the file system is")
    assert advise(found, items(KB)).order == Shuffle()


def test_whole_chunks_are_read_in_windows_however_fast_random_reads_are() -> None:
    stored = items(295 * KB, chunk_items=50, read_bytes=50.0 * 295 * KB, is_whole=True, is_fixed=True)
    advice = advise(speed(NVME, 1 << 20, 2 * GB, 2000, 2000), stored)
    assert (advice.order, advice.chunk_items) == (WindowShuffle(18), 50)
    assert str(advice).startswith("WindowShuffle(window=18) over chunks of 50 items, mixing score ")


def test_chunks_of_a_fixed_size_keep_it() -> None:
    stored = items(KB, chunk_items=50, is_fixed=True)
    advice = advise(speed(DISK, KB, 150 * MB, 90, 200), stored)
    assert advice.chunk_items == 50
    assert advice.reason.endswith(", and chunks of 0.05 MB 0.06")


def test_windows_keep_within_a_fraction_of_little_memory() -> None:
    advice = advise(speed(DISK, 295 * KB, 150 * MB, 80, 130), items(295 * KB), memory_bytes=GB)
    assert (advice.window or 0) >= 4
    assert window_bytes(advice, 295 * KB) <= GB / 16


def test_the_first_batch_waits_for_no_more_than_two_seconds_of_reading() -> None:
    advice = advise(speed(NFS, 295 * KB, 20 * MB, 10, 60), items(295 * KB))
    assert 30 * MB < window_bytes(advice, 295 * KB) <= 40 * MB


def test_items_of_unknown_size_in_memory_are_not_held() -> None:
    advice = advise(speed(DISK, 295 * KB, 150 * MB, 80, 130), items(295 * KB, held_bytes=None))
    assert isinstance(advice.order, WindowShuffle)
    assert not advice.order.held


def test_a_dataset_that_fits_in_memory_is_told_that_shuffle_is_free_later() -> None:
    found = speed(DISK, KB, 150 * MB, 90, 200)
    said = "The dataset (800.0 MB) fits in memory: from the second epoch on, Shuffle() costs nothing."
    assert advise(found, items(KB, 800 * MB)).remark == said
    assert advise(found, items(KB)).remark == ""
    cached = StorageSpeed(DISK, 1000, n_resident=100, unknown="in memory: what was tried is in the page cache")
    said = "The dataset (800.0 MB) fits in memory: it seems to be there now, and then Shuffle() costs nothing."
    assert advise(cached, items(KB, 800 * MB)).remark == said
    assert advise(speed(NVME, 295 * KB, 2 * GB, 2500, 6500), items(295 * KB, 800 * MB)).remark == ""


def test_a_dataset_without_items_has_an_order() -> None:
    empty = StoredDataset([], [], 0, 0.0, 64, 0)
    for found in (speed(DISK, KB, 150 * MB, 90, 200), StorageSpeed(DISK, 1, unknown="no bytes")):
        assert advise(found, empty).mixing == 0


def test_figures_and_advice_are_plain_json_and_one_sentence() -> None:
    found = speed(DISK, 295 * KB, 150 * MB, 80, 130)
    advice = advise(found, items(295 * KB))
    assert json.loads(json.dumps(advice.to_dict())) == {
        "order": "WindowShuffle(window=33)",
        "window": 33,
        "held": True,
        "chunk_items": 27,
        "mixing": advice.mixing,
        "reason": advice.reason,
        "remark": "",
    }
    assert str(advice) == (
        f"WindowShuffle(window=33) with chunk_items=27, mixing score {advice.mixing:.2f} of 1: {advice.reason}."
    )
    assert json.loads(json.dumps(found.to_dict())) == {
        "file_system": "xfs",
        "mount": "/data",
        "is_rotating": True,
        "is_remote": False,
        "is_memory": False,
        "read_bytes": 295_000,
        "sequential": 150e6,
        "random_alone": 80,
        "random_together": 130,
        "n_timed": 100,
        "n_resident": 0,
        "unknown": "",
    }
    assert str(found) == (
        "/data (xfs): 150 MB/s in sequence; random reads of 295 kB: 80/s one at a time, 130/s (38 MB/s) 32 at a time"
    )


def test_of_large_items_only_the_fields_that_are_asked_for_are_read(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"x": np.zeros((4, 50_000)), "y": np.zeros((4, 10))}, shard_size=2)
    manifest = Manifest.read(manifest_path(tmp_path))
    read = {held: describe_shards(manifest, chunk_items=64, held_bytes=held) for held in (None, 80, 100_000, 10**6)}
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.tar")) / 4
    assert {held: found.read_bytes for held, found in read.items()} == {
        None: whole,
        80: 64 << 10,
        100_000: 100_000,
        10**6: whole,
    }
    assert [path.name for path in read[80].files] == ["shard_000000.tar", "shard_000001.tar"]
    some = describe_shards(manifest, chunk_items=64, held_bytes=80, shards=[1])
    assert ([path.name for path in some.files], np.asarray(some.n_items).tolist()) == (["shard_000001.tar"], [2])


def test_of_very_many_shards_some_neighbours_are_measured() -> None:
    chosen = shards._choose_files(np.arange(7, 100_007))
    assert chosen[:16] == list(range(7, 23))
    assert chosen[-16:] == list(range(100_007 - 16, 100_007))
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 1024
    assert shards._choose_files(np.array([3, 1])) == [3, 1]
