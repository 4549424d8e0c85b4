"""Whole batches with one call of C: any rows of any blocks, and numbers that point anywhere."""

import mmap
import os
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from penstock_guarded_maps import GuardedMap, guarded_array
from penstock_native import needs_c

from penstock.source import native

pytestmark = needs_c
EXTREME = (-(1 << 63), -(1 << 62), -64, -1, 1 << 31, 1 << 62, (1 << 63) - 1)
HEAD, ROW = 24, 40  # bytes before a row of the sample layout, and of a row
SETTLED_NS = 1


class Place(NamedTuple):
    """Where the rows of a column lie; as in `struct column` of native.c."""

    first: int = 0
    step: int = 0
    at: int = 0
    begins: int = 0
    member: tuple[int, int, int, int] = (0, 0, ROW, ROW)
    checksums_at: int = 0
    checksum_bytes: int = 8


class Shard:
    """A file of random bytes and one of numbers about it, mapped between pages that cannot be touched."""

    def __init__(self, folder: Path, number: int, n_rows: int) -> None:
        rng = np.random.default_rng(number)
        self.n_rows, self.starts = n_rows, np.array([0, 3, 4, n_rows], np.int64)
        self.begins = np.array([1000, 100, 500], np.int64)
        content = rng.integers(0, 256, 1000 + n_rows * ROW).astype(np.uint8).tobytes()
        self.blocked = [
            content[self.begins[block] + (row - self.starts[block]) * ROW :][:ROW]
            for row, block in ((row, int(np.searchsorted(self.starts, row, side="right")) - 1) for row in range(n_rows))
        ]
        self.places = rng.integers(0, 900, n_rows)
        self.stored = [content[place : place + HEAD + ROW + 5] for place in self.places.tolist()]
        short = np.array([xxhash.xxh3_64_intdigest(row) & 0xFFFFFFFF for row in self.blocked], "<u4").tobytes()
        whole = np.array([xxhash.xxh3_64_intdigest(row) for row in self.stored], "<u8").tobytes()
        index = [b"\0" * 8, self.places.astype("<i8").tobytes(), whole, short.ljust(-(-len(short) // 8) * 8, b"\0")]
        self.columns = [
            Place(step=ROW, begins=self.begins.ctypes.data, checksums_at=8 + 16 * n_rows, checksum_bytes=4),
            Place(at=8, member=(0, HEAD, ROW, HEAD + ROW + 5), checksums_at=8 + 8 * n_rows),
        ]
        self.paths = [folder / f"{number}.tar", folder / f"{number}.index"]
        self.files, self.maps, self.rows = [], [], []
        for path, stored in zip(self.paths, (content, b"".join(index)), strict=True):
            path.write_bytes(stored)
            os.utime(path)
            self.files.append(os.open(path, os.O_RDONLY))
            self.maps.append(GuardedMap(self.files[-1], len(stored)))
            changed_ns = os.fstat(self.files[-1]).st_ctime_ns
            self.rows.append((self.files[-1], self.maps[-1].address, len(stored), changed_ns))

    def part(self, columns: list[Place] | None = None) -> NDArray[np.int64]:
        numbers = [*self.rows[0], *self.rows[1], self.n_rows, len(self.starts) - 1, self.starts.ctypes.data]
        for place in columns or self.columns:
            numbers += [*place[:4], *place.member, *place[5:]]
        return np.array(numbers, np.int64)

    def __del__(self) -> None:
        for file in self.files:
            os.close(file)


class Dataset:
    """Shards, and the table of them that C reads."""

    def __init__(self, folder: Path, *, verify: bool) -> None:
        self.shards = [Shard(folder, number, n_rows) for number, n_rows in enumerate((7, 20, 5, 9))]
        sizes = [shard.n_rows for shard in self.shards]
        self.borders = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.bits = np.zeros((4, 3), np.uint8)
        self.bits_at = self.bits.ctypes.data + np.arange(0, 12, 3)
        self.verify = verify
        self.use([shard.part() for shard in self.shards])

    def use(self, parts: "list[NDArray[np.int64] | None]") -> None:
        self.kept = parts
        self.parts = np.array([0 if part is None else part.ctypes.data for part in parts], np.int64)
        bits = self.bits_at.ctypes.data if self.verify else 0
        addresses = (self.borders.ctypes.data, self.parts.ctypes.data, bits)
        self.table = np.array([len(parts), 2, *addresses, self.verify, SETTLED_NS], np.int64)

    def take(self, items: list[int], places: list[int] | None = None) -> "tuple[int, list[NDArray[np.uint8]]]":
        n_rows = max(places or [0, len(items) - 1]) + 1
        targets = [guarded_array(n_rows * ROW) for _ in range(2)]
        rooms = np.array([(array.ctypes.data, array.nbytes) for array, _ in targets], np.int64).tobytes()
        packed = None if places is None else np.array(places, np.int64).tobytes()
        found = native.take_items(
            self.table.ctypes.data, len(items), np.array(items, np.int64).tobytes(), packed, rooms
        )
        return found, [array.reshape(-1, ROW).copy() for array, _ in targets]

    def expected(self, item: int) -> tuple[bytes, bytes]:
        number = int(np.searchsorted(self.borders, item, side="right")) - 1
        shard, row = self.shards[number], item - int(self.borders[number])
        return shard.blocked[row], shard.stored[row][HEAD : HEAD + ROW]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("count", [1, 2, 41, 64, 65, 300])
def test_any_items_in_any_order_and_rows(tmp_path: Path, verify: bool, count: int) -> None:
    data = Dataset(tmp_path, verify=verify)
    rng = random.Random(count)
    items = [rng.randrange(41) for _ in range(count)]
    places = rng.sample(range(count + 9), count)
    for rows in (None, places):
        found, taken = data.take(items, rows)
        assert found >= 0
        assert (found > 0) == verify
        for row, item in zip(rows or range(count), items, strict=True):
            assert tuple(array[row].tobytes() for array in taken) == data.expected(item)
        assert all(
            not array[row].any() for array in taken for row in set(range(len(array))) - set(rows or range(count))
        )


def test_verified_items_are_marked_and_not_verified_again(tmp_path: Path) -> None:
    data = Dataset(tmp_path, verify=True)
    packed = np.array([0, 8, 40], np.int64).tobytes()
    found, _ = data.take([0, 8, 40])
    native.mark_items(data.table.ctypes.data, 3, packed, 1)  # all were written to later than that
    assert not data.bits.any()
    native.mark_items(data.table.ctypes.data, 3, packed, found + SETTLED_NS)
    assert np.flatnonzero(np.unpackbits(data.bits, bitorder="little")).tolist() == [0, 24 + 1, 72 + 8]
    assert data.take([0, 8, 40])[0] == 0
    assert data.take([0, 8, 39])[0] > 0


def test_a_wrong_byte_is_found_in_each_column(tmp_path: Path) -> None:
    data = Dataset(tmp_path, verify=True)
    shard = data.shards[1]
    begins = [int(shard.begins[1]), int(shard.places[3]), int(shard.places[3]) + HEAD + ROW + 4]
    for begin in begins:
        with shard.paths[0].open("r+b") as file:
            right = os.pread(file.fileno(), 1, begin)
            os.pwrite(file.fileno(), bytes([right[0] ^ 16]), begin)
            row = list(shard.rows[0])
            row[3] = os.fstat(file.fileno()).st_ctime_ns  # as if it was opened now
            shard.rows[0] = tuple(row)
            data.use([one.part() for one in data.shards])
            assert data.take([0, 7 + 3])[0] == -1
            os.pwrite(file.fileno(), right, begin)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("verify", [False, True])
def test_files_that_are_written_to_or_truncated(tmp_path: Path, which: int, verify: bool) -> None:
    data = Dataset(tmp_path, verify=verify)
    assert data.take([8, 9])[0] >= 0
    path = data.shards[1].paths[which]
    os.utime(path)
    assert data.take([8, 9])[0] == -1
    assert data.take([0, 40])[0] >= 0
    os.truncate(path, 0)
    assert data.take([8, 9])[0] == -1


def test_what_is_not_open_or_not_there(tmp_path: Path) -> None:
    data = Dataset(tmp_path, verify=False)
    for item in (-1, 41, *EXTREME):
        assert data.take([0, item])[0] == -1
    assert data.take([])[0] == -1
    data.use([None, *(shard.part() for shard in data.shards[1:])])
    assert data.take([3, 8])[0] == -1
    assert data.take([7, 8])[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_forged_numbers_read_and_write_nothing_else(tmp_path: Path, seed: int) -> None:
    rng, data, seen = random.Random(seed), Dataset(tmp_path, verify=seed % 2 == 0), [0, 0]
    shard, items = data.shards[1], list(range(7, 27))
    for _ in range(600):
        columns = [list(place[:3]) + list(place.member) + [place.checksums_at] for place in shard.columns]
        for _ in range(rng.choice((0, 1, 1, 2))):
            column, number = rng.choice(columns), rng.randrange(8)
            if number != 5:  # the room of a row, which the targets have
                near = [max(EXTREME[0], column[number] - 1), min(EXTREME[-1], column[number] + 1)]
                column[number] = rng.choice((*EXTREME, 0, 7, mmap.PAGESIZE, *near))
        forged = [
            Place(*some[:3], place.begins, (some[3], some[4], some[5], some[6]), some[7], place.checksum_bytes)
            for some, place in zip(columns, shard.columns, strict=True)
        ]
        data.use([data.shards[0].part(), shard.part(forged), None, None])
        places = [*range(20)]
        if rng.random() < 0.2:
            places[rng.randrange(20)] = rng.choice((*EXTREME, 20))
            rooms = [guarded_array(20 * ROW) for _ in range(2)]
            packed = np.array([(array.ctypes.data, array.nbytes) for array, _ in rooms], np.int64).tobytes()
            numbers = [np.array(some, np.int64).tobytes() for some in (items, places)]
            found = native.take_items(data.table.ctypes.data, 20, *numbers, packed)
            assert found == -1
            continue
        seen[data.take(items)[0] >= 0] += 1
    assert min(seen) > 50  # both kinds were tried
