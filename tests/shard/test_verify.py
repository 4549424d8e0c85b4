"""`verify` finds every kind of damage, and says which shard, which item and why."""

import inspect
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_page_cache import cached_pages, can_be_dropped, drop
from penstock_test_parts import eventually

from penstock import TarSource
from penstock.core.errors import DamageError, SourceError
from penstock.files import read_ahead
from penstock.shard.index_tars import index_archives
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.verify import verify_shards
from penstock.shard.writer import ShardWriter
from tests.shard.samples import sample, write

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
SECOND = "shard_000001.tar"  # items 3, 4, 5; each has three members of 1024 bytes, beginning with their headers


def found(folder: Path, **options: Any) -> list[tuple[str, int | None, str]]:
    return [(problem.shard, problem.item, problem.reason) for problem in verify_shards(folder, **options)[1]]


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("compression", ["none", "gz", "bz2", "xz"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_healthy_dataset_has_no_problems(compression: Any, workers: int, tmp_path: Path) -> None:
    write(tmp_path, compression=compression)
    done_bytes: list[int] = []
    manifest, problems = verify_shards(tmp_path, workers=workers, progress=done_bytes.append)
    assert problems == []
    assert manifest.n_items == 7
    assert sum(done_bytes) == sum(path.stat().st_size for path in tmp_path.glob("*.tar"))


@pytest.mark.parametrize(
    ("place", "item", "suffix"),
    [
        (0, 3, "x.npy"),
        (511, 3, "x.npy"),
        (512, 3, "x.npy"),
        (700, 3, "x.npy"),  # padding
        (1023, 3, "x.npy"),
        (1024, 3, "note.txt"),
        (2048 + 600, 3, "metadata.json"),
        (3072, 4, "x.npy"),
        (3 * 3072 - 1, 5, "metadata.json"),
    ],
)
def test_a_flipped_bit_is_found_with_its_item_and_member(place: int, item: int, suffix: str, tmp_path: Path) -> None:
    write(tmp_path)
    flip(tmp_path / SECOND, place)
    assert found(tmp_path) == [(SECOND, item, f"the checksum of {suffix!r} does not match its bytes")]


def test_several_damaged_items_are_all_listed(tmp_path: Path) -> None:
    write(tmp_path)
    flip(tmp_path / "shard_000000.tar", 0, 3072 + 600)
    flip(tmp_path / "shard_000002.tar", 5)
    assert [(shard, item) for shard, item, _ in found(tmp_path, workers=2)] == [
        ("shard_000000.tar", 0),
        ("shard_000000.tar", 1),
        ("shard_000002.tar", 6),
    ]


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("last", [".DS_Store", "._2.cls", "folder/"])
def test_a_hidden_file_or_a_folder_may_be_the_last_member(last: str, compression: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.tar" if compression == "none" else "a.tar.gz")
    with tarfile.open(path, "w" if compression == "none" else "w:gz") as tar:
        for name in ("0.cls", "1.cls", "2.cls", last):
            member = tarfile.TarInfo(name.rstrip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.size = 1 if member.isreg() else 0
            tar.addfile(member, io.BytesIO(b"7"))
    manifest, problems = index_archives(tmp_path)
    assert (problems, manifest is not None and manifest.n_items) == ([], 3)
    assert found(tmp_path) == []
    if compression == "none":
        flip(path, 3 * 1024 + 5)  # the name of the last member
        assert found(tmp_path) == [("a.tar", None, "the tar blocks of zeros that end the archive are damaged")]


def test_a_shard_that_the_manifest_does_not_list_is_reported(tmp_path: Path) -> None:
    write(tmp_path)
    for suffix in ("", ".index"):
        (tmp_path / f"shard_000007.tar{suffix}").write_bytes((tmp_path / f"{SECOND}{suffix}").read_bytes())
    assert found(tmp_path) == [
        ("shard_000007.tar", None, "it is not listed in the manifest, so it is not part of the dataset")
    ]


def test_an_unfinished_write_is_reported(tmp_path: Path) -> None:
    write(tmp_path)
    writer = ShardWriter(tmp_path, WriteOptions(), overwrite=True)
    writer.write(sample(0), None, None)
    writer.abandon()
    ((where, item, reason),) = found(tmp_path)
    assert (where, item) == (".writing", None)
    assert "has not finished" in reason


def test_an_unfinished_write_alone_is_no_dataset(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WriteOptions(shard_size=1))
    writer.write(sample(0), None, None)
    writer.abandon()
    with pytest.raises(SourceError, match="a writer has not finished there"):
        verify_shards(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_are_read_one_at_a_time_also_without_workers(workers: int, tmp_path: Path) -> None:
    write(tmp_path)
    assert verify_shards(tmp_path, workers=workers)[1] == []
    assert inspect.signature(verify_shards).parameters["workers"].default == 1


@pytest.mark.parametrize("n_damaged", [1000, 1100])
def test_a_thousand_problems_are_listed_and_the_rest_counted(n_damaged: int, tmp_path: Path) -> None:
    write(tmp_path, n_damaged, shard_size=2000, make=lambda n: {"n": n})
    path = tmp_path / "shard_000000.tar"
    content = bytearray(path.read_bytes())
    for place in range(0, len(content) - 1024, 2048):
        content[place] ^= 1
    path.write_bytes(content)
    problems = found(tmp_path)
    assert [item for _, item, _ in problems[:1000]] == list(range(1000))
    assert problems[1000:] == ([("shard_000000.tar", None, "and 100 more")] if n_damaged > 1000 else [])


# -- compressed --------------------------------------------------------------------------------------------------------


def healthy(folder: Path) -> bool:
    """Return whether all items can be read, exactly."""
    try:
        source = TarSource(folder, fields=["x"])
        return bool(source.take(np.arange(4))["x"].tolist() == [[n, -n] for n in range(4)])
    except DamageError:
        return False


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_verify_and_reading_agree_on_every_damaged_byte_of_a_compressed_shard(compression: Any, tmp_path: Path) -> None:
    write(tmp_path, 4, shard_size=4, compression=compression)
    path = tmp_path / "shard_000000.tar"
    content = path.read_bytes()
    end = len(content) - 30  # the sizes and checksums of the whole stream
    for place in range(len(content)) if SOAK else [*range(0, end, 5), *range(end, len(content))]:
        flip(path, place)
        assert (found(tmp_path) == []) == healthy(tmp_path), f"byte {place} of {len(content)}"
        path.write_bytes(content)


def _write_large(folder: Path) -> Path:
    """Write one shard of 2.6 MB; item i is 800 values i, 3 KiB in the archive, and its metadata 1 KiB."""
    write(folder, 500, shard_size=1000, make=lambda number: {"x": np.full(800, number, np.float32)})
    return folder / "shard_000000.tar"


def test_items_of_a_large_shard_are_found_in_their_order(tmp_path: Path) -> None:
    shard = _write_large(tmp_path)
    assert found(tmp_path) == []
    item_bytes = (shard.stat().st_size - 1024) // 500
    damaged = [0, 1, 254, 255, 256, 257, 398, 499]
    flip(shard, *(item * item_bytes + 600 for item in damaged))
    expected = [("shard_000000.tar", item, "the checksum of 'x.npy' does not match its bytes") for item in damaged]
    assert found(tmp_path) == expected


def test_damage_before_the_place_where_a_large_shard_ends_is_listed_first(tmp_path: Path) -> None:
    shard = _write_large(tmp_path)
    size = shard.stat().st_size
    item_bytes = (size - 1024) // 500
    flip(shard, 260 * item_bytes + 600)
    os.truncate(shard, 300 * item_bytes + 700)
    assert found(tmp_path) == [
        ("shard_000000.tar", None, f"truncated: {300 * item_bytes + 700} bytes, but {size} were written"),
        ("shard_000000.tar", 260, "the checksum of 'x.npy' does not match its bytes"),
        ("shard_000000.tar", 300, "'x.npy' is truncated: the shard ends too early"),
    ]


@pytest.mark.parametrize("is_large", [False, True])
def test_pages_of_a_dataset_larger_than_memory_are_given_back(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = _write_large(tmp_path)
    if not can_be_dropped(shard):
        pytest.skip("this file system keeps its pages")
    if is_large:
        monkeypatch.setattr(read_ahead, "_KEPT_SHARE", 0.0)

    def verify_cold() -> bool:
        drop(shard)
        assert found(tmp_path) == []
        return bool(cached_pages(shard).any()) == (not is_large)

    assert eventually(verify_cold)  # the kernel keeps pages that another processor holds at that moment
    shard.read_bytes()  # now somebody uses it
    assert found(tmp_path) == []
    assert cached_pages(shard).all()
