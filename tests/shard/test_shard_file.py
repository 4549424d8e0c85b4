"""One shard while it is written: the same bytes however members meet the borders of what is written at once."""

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from penstock_cases import few_cases

from penstock.shard import shard_file
from penstock.shard.codec import Payload
from penstock.shard.shard_file import FileSink, ShardFile

TAR_BLOCK = 512
AT_ONCE = 256 << 10


def payload(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


def shard(folder: Path, sizes: list[int], compression: Any = "none") -> ShardFile:
    """Write one item of one member for each size; its bytes come in two buffers, as those of arrays do."""
    file = ShardFile(FileSink(folder, "a.tar"), compression)
    for number, size in enumerate(sizes):
        content = payload(number, size)
        buffers = (content[: size // 3], memoryview(content)[size // 3 :])
        file.add(f"key{number}", ["bin"], [Payload("bin", buffers, size)])
    return file


near = st.builds(
    lambda whole, blocks, more: max(0, whole + TAR_BLOCK * blocks + more),
    st.sampled_from([0, 1 << 16, AT_ONCE, 2 * AT_ONCE]),
    st.integers(-3, 3),
    st.integers(-1, 1),
)


@few_cases
@given(sizes=st.lists(near, min_size=1, max_size=5), compression=st.sampled_from(["none", "gz"]))
@example(sizes=[AT_ONCE - TAR_BLOCK], compression="none")  # the member fills the buffer exactly
@example(sizes=[3 * AT_ONCE - TAR_BLOCK, AT_ONCE - TAR_BLOCK - 1024], compression="none")  # the end of the archive does
@example(sizes=[AT_ONCE - TAR_BLOCK, 2 * AT_ONCE], compression="none")
def test_the_archive_has_every_byte_in_its_place(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], compression: Any
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    entry, layout = shard(folder, sizes, compression).close()
    stored = (folder / "a.tar").read_bytes()
    whole = gzip.decompress(stored) if compression == "gz" else stored
    assert (entry.stored_bytes, entry.tar_bytes, entry.n_items) == (len(stored), len(whole), len(sizes))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        found = [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    assert found == [(f"key{number}.bin", payload(number, size)) for number, size in enumerate(sizes)]
    (column,) = layout.columns
    rows = np.arange(len(sizes))
    borders = zip(column.begins.at(rows), column.ends(rows), strict=True)
    assert column.checksums.tolist() == [xxhash.xxh3_64_intdigest(whole[begin:end]) for begin, end in borders]


def test_writes_are_aligned_except_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = os.write

    def noted(handle: int, content: memoryview) -> int:
        written.append(len(content))
        return write(handle, content)

    monkeypatch.setattr("penstock.files.durable.os.write", noted)
    file = shard(tmp_path, [100, 300_000, 70_000, 5 * AT_ONCE, *[3000] * 100])
    file.close()
    monkeypatch.undo()
    assert written.pop() == (tmp_path / "a.tar.index").stat().st_size
    begins = np.cumsum([0, *written])
    assert begins[-1] == (tmp_path / "a.tar").stat().st_size
    assert len(written) > 3
    assert min(written[:-1]) == AT_ONCE
    assert not (begins[:-1] % AT_ONCE).any()


def test_the_disk_is_asked_to_begin_after_every_eight_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    monkeypatch.setattr(shard_file, "_sync_file_range", lambda _, *place: asked.append(place))
    file = shard(tmp_path, [1 << 20] * 18)
    file.close()
    begin_writing = 2  # SYNC_FILE_RANGE_WRITE
    assert asked == [(0, 8 << 20, begin_writing), (8 << 20, 8 << 20, begin_writing)]


def test_a_discarded_shard_leaves_no_file_and_may_be_discarded_again(tmp_path: Path) -> None:
    file = shard(tmp_path, [100])
    for _ in range(2):
        file.discard()
        assert list(tmp_path.iterdir()) == []
