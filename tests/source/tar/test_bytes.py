"""Only the requested bytes of a shard are read, and they are verified again if the file has changed."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_source_suite import same
from penstock_test_shards import flip, grid, member_places, uniform, write

from penstock import DamageError, TarSource


def test_a_field_that_is_not_requested_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23)
    (shard,) = (tmp_path / "set").glob("*.tar")
    for name, (offset, size) in member_places(shard).items():
        if ".y." in name or "metadata" in name:
            for at in (offset - 512, offset + size - 1):  # header and data
                flip(shard, at)
    source = TarSource(tmp_path / "set", fields=["x"], verify="always")
    assert source.take(np.arange(23))["x"].tolist() == list(range(23))
    with pytest.raises(DamageError, match=r"item 4 in shard_000000\.tar"):
        TarSource(tmp_path / "set", fields=["x", "y"]).take(np.array([4]))
    with pytest.raises(DamageError, match=r"item 4 in shard_000000\.tar"):
        TarSource(tmp_path / "set", fields=["metadata"]).take(np.array([4]))


def pages_in_memory(path: Path) -> set[int]:
    """Return which pages of a file are in the page cache."""
    n_pages = -(-path.stat().st_size // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * n_pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        found = ctypes.CDLL(None).mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(whole)), there)
        del whole
    assert found == 0
    return {number for number, page in enumerate(there) if page & 1}


def forget_pages(path: Path) -> None:
    """Sync a file and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("field", ["small", "big"])
def test_reading_some_fields_reads_their_pages_only(tmp_path: Path, field: str) -> None:
    samples = [{"small": np.int64(i), "big": np.full(50_000, i, np.float32)} for i in range(20)]
    write(tmp_path / "set", samples, shard_size=20)
    (shard,) = (tmp_path / "set").glob("*.tar")
    source = TarSource(tmp_path / "set", fields=[field])
    forget_pages(shard)
    if pages_in_memory(shard):
        pytest.skip("this file system keeps its files in memory")
    asked = [3, 11]
    assert source.take(np.array(asked))[field].reshape(2, -1)[:, 0].tolist() == asked
    found = pages_in_memory(shard)
    places = member_places(shard)
    wanted = set()
    for item in asked:
        offset, size = places[f"sample_{item:09d}.{field}.npy"]
        wanted |= set(range((offset - 512) // mmap.PAGESIZE, -(-(offset + -(-size // 512) * 512) // mmap.PAGESIZE)))
    assert wanted <= found
    assert len(found) <= 2 * len(wanted) + 16  # of a thousand; a system may read a little around what it is asked for


@pytest.mark.parametrize("verify", ["first", "always"])
def test_damage_to_an_item_that_was_verified_before_is_noticed(tmp_path: Path, verify: Any) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23)
    (shard,) = (tmp_path / "set").glob("*.tar")
    source = TarSource(tmp_path / "set", fields=["y"], verify=verify)
    assert same(source.take(np.array([7]))["y"][0], grid(7))
    offset, size = member_places(shard)["sample_000000007.y.npy"]
    flip(shard, offset + size - 1)
    for _ in range(2):
        with pytest.raises(DamageError, match=r"item 7 in shard_000000\.tar"):
            source.take(np.array([7]))
    assert same(source.take(np.array([8]))["y"][0], grid(8))
    flip(shard, offset + size - 1)
    assert same(source.take(np.array([7]))["y"][0], grid(7))  # mended
    source.close()


def test_without_verification_bytes_are_delivered_unchecked(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23)
    (shard,) = (tmp_path / "set").glob("*.tar")
    offset, size = member_places(shard)["sample_000000007.y.npy"]
    flip(shard, offset + size - 1)
    found = TarSource(tmp_path / "set", fields=["y"], verify="never").take(np.array([6, 7]))["y"]
    assert same(found[0], grid(6))
    assert found[1].tobytes()[:-1] == grid(7).tobytes()[:-1]
    assert not same(found[1], grid(7))
