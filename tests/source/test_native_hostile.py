"""The C part with any geometry: what does not fit is refused in C itself, and no other byte is read or written.

Maps and targets lie between pages that cannot be touched; `tools/sanitize.py` runs this with AddressSanitizer, too.
"""

import contextlib
import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from penstock_guarded_maps import GuardedMap, guarded_array
from penstock_native import needs_c, use_numpy

from penstock.source import native
from penstock.source.native import INVALID, ExpectedChecksums, StoredItems, compiled, copy_items

SIZES = (mmap.PAGESIZE, mmap.PAGESIZE - 1, mmap.PAGESIZE + 1, 300)
EXTREME = (-(1 << 63), -(1 << 62), -(1 << 31), -64, -1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1)
SMALL = (0, 1, 8, 63, 64, 65, 128, 240, 241, 256, 300, 512)


class Stored:
    """A file of random bytes, mapped between guard pages."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.content = np.random.default_rng(n_bytes).integers(0, 256, n_bytes).astype(np.uint8).tobytes()
        path.write_bytes(self.content)
        self.file = os.open(path, os.O_RDONLY)
        self.mapped = GuardedMap(self.file, n_bytes)
        self.row = (self.file, self.mapped.address, n_bytes, os.fstat(self.file).st_ctime_ns)

    def __del__(self) -> None:
        os.close(self.file)


@pytest.fixture(params=[pytest.param("c", marks=needs_c), "numpy"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both refuse the same."""
    with use_numpy() if request.param == "numpy" else contextlib.nullcontext():
        yield


def copy_one(stored: Stored, begin: int, member: tuple[int, int, int, int], checksum: int | None) -> tuple[int, int]:
    expected = None
    if checksum is not None:
        expected = ExpectedChecksums(np.ones(1, bool), np.array([[checksum]], np.uint64))
    target, _kept = guarded_array(max(0, member[2]))
    found = copy_items(
        StoredItems(np.array([stored.row]), np.zeros(1, np.int64), np.array([begin])),
        np.array([member]),
        targets=[target],
        places=np.zeros(1, np.int64),
        expected=expected,
    )
    if found[0]:
        assert target.tobytes() == stored.content[begin + member[1] :][: member[2]]
    return found


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("head", [0, 1, 40])
def test_members_of_any_length_at_the_start_and_the_end_of_a_file(
    tmp_path: Path, size: int, at_end: bool, head: int
) -> None:
    stored = Stored(tmp_path / "a", size)
    for length in range(head, 300):
        begin = size - length if at_end else 0
        member = (0, head, length - head, length)
        checksum = xxhash.xxh3_64_intdigest(stored.content[begin : begin + length])
        assert copy_one(stored, begin, member, None) == (1, -1)
        assert copy_one(stored, begin, member, checksum) == (1, -1)
        assert copy_one(stored, begin, member, checksum ^ 1 << length % 64) == (0, 0)
        assert copy_one(stored, begin + 1 if at_end else -1, member, checksum) == (0, INVALID)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "member",
    [
        (-1, 512, 8, 1024),
        (0, -1, 8, 1024),
        (512, 0, 8, 1024),
        (0, 512, -1, 1024),
        (0, 512, 513, 1024),
        (0, 1024, 8, 1024),
        (0, 512, 8, 511),
        (0, 0, 0, -1),
        (1024, 1024, 0, 512),
        (0, 512, (1 << 63) - 1, 1024),
        (-(1 << 63), 512, 8, (1 << 63) - 1),
    ],
)
@pytest.mark.parametrize("one_each", [False, True])
def test_members_that_contradict_themselves(tmp_path: Path, member: tuple[int, ...], one_each: bool) -> None:
    stored = Stored(tmp_path / "a", 2 * mmap.PAGESIZE)
    target, _kept = guarded_array(1024)
    found = copy_items(
        StoredItems(np.array([stored.row]), np.zeros(2, np.int64), np.array([1024, 1024])),
        np.array([member, member] if one_each else [member]),
        targets=[target],
        places=np.arange(2),
        expected=None,
        one_each=one_each,
    )
    assert found == (0, INVALID)
    assert not target.any()


@pytest.mark.usefixtures("implementation")
def test_only_items_that_fit_into_the_target_are_copied(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "a", mmap.PAGESIZE)
    rows = StoredItems(np.array([stored.row]), np.zeros(3, np.int64), np.arange(3) * 512)
    member = np.array([(0, 0, 100, 512)])
    for last in (2, -1, 1 << 62, (1 << 63) - 1):
        target, _kept = guarded_array(299)  # two rows and most of a third
        places = np.array([1, 0, last])
        assert copy_items(rows, member, targets=[target], places=places, expected=None) == (2, INVALID)
        assert target.tobytes() == stored.content[512:612] + stored.content[:100] + bytes(99)
    target, _kept = guarded_array(299)
    places = np.array([0, 199, 200])
    each = np.repeat(member, 3, axis=0)
    assert copy_items(rows, each, targets=[target], places=places, expected=None, one_each=True) == (2, INVALID)
    assert target[199:].tobytes() == stored.content[512:612]


@dataclass
class Call:
    """Arguments of `penstock_copy`, as plain numbers; Python computes what it must do."""

    n_items: int
    shards: list[tuple[int, int, int, int]]
    which: list[int]
    begins: list[int]
    members: list[tuple[int, int, int, int]]
    one_each: bool
    targets: list[NDArray[np.uint8]]
    places: list[int]
    unverified: list[bool] | None

    def n_valid(self) -> int:
        return next((item for item in range(max(0, self.n_items)) if not self._is_valid(item)), max(0, self.n_items))

    def members_of(self, item: int) -> list[tuple[int, int, int, int]]:
        return [self.members[item]] if self.one_each else self.members

    def _is_valid(self, item: int) -> bool:
        members = self.members_of(item)
        if not members or not 0 <= self.which[item] < len(self.shards) or not 0 <= self.places[item] < (1 << 63) - 1:
            return False
        _, address, n_bytes, _ = self.shards[self.which[item]]
        extent = members[-1][3]
        for (begin, data, size, end), target in zip(members, self.targets, strict=True):
            fits = 0 <= begin <= data <= end <= extent and 0 <= size <= end - data
            place = self.places[item] * (1 if self.one_each else size)
            if not fits or place + size > len(target):
                return False
        is_map = n_bytes >= 0 and (address or not n_bytes) and address % (1 << 64) + n_bytes < 1 << 64
        return bool(is_map) and 0 <= self.begins[item] <= n_bytes - extent

    def run(self, sums: NDArray[np.uint64] | None) -> tuple[int, int]:
        """Call the C function itself: nothing of Python is in between."""
        wrong = ctypes.c_int64()
        rooms = [(target.ctypes.data, len(target)) for target in self.targets]
        given = (self.shards, self.which, self.begins, self.members, rooms, self.places)
        tables = [np.array(table, np.int64) for table in given]
        shards, which, begins, members, targets, places = (table.ctypes.data for table in tables)
        flags = None if self.unverified is None else np.array(self.unverified, np.bool_)
        n_copied = compiled.library().penstock_copy(
            *(self.n_items, len(self.shards), shards, which, begins, len(self.targets), members, self.one_each),
            *(targets, places, None if flags is None else flags.ctypes.data),
            *(None if sums is None else sums.ctypes.data, (1 << 64) - 1, ctypes.byref(wrong)),
        )
        return n_copied, wrong.value


def make_call(rng: random.Random, stored: list[Stored]) -> tuple[Call, list[GuardedMap]]:
    """Return a call that is valid but for some numbers, most often one."""
    hostile = rng.choice([0.0, 0.02, 0.2])

    def number(usual: int) -> int:
        return usual if rng.random() >= hostile else rng.choice((*EXTREME, *SMALL, usual - 1, usual + 1, -usual))

    n_items, n_members, one_each = rng.randint(1, 6), rng.randint(1, 3), rng.random() < 0.5
    which = [number(rng.randrange(len(stored))) for _ in range(n_items)]
    least = min(len(one.content) for one in stored)
    members: list[tuple[int, int, int, int]] = []
    end = 0
    for _ in range(n_items if one_each else n_members):
        begin = 0 if one_each else end
        length = rng.choice(SMALL) if rng.random() < 0.1 else rng.randint(0, least // n_members)
        head = rng.randint(0, length)
        size = rng.randint(0, length - head)
        end = begin + length
        members.append((number(begin), number(begin + head), number(size), number(end)))
    room = [max(0, min(size, least)) for _, _, size, _ in members]
    arrays = [guarded_array(sum(room))] if one_each else [guarded_array(n_items * size) for size in room]
    usual = np.cumsum([0, *room]).tolist() if one_each else rng.sample(range(n_items), n_items)
    ends = [member[3] for member in members] if one_each else [members[-1][3]] * n_items
    begins = [number(rng.choice((0, min(least, max(0, least - end)), rng.randint(0, least)))) for end in ends]
    shards = [(number(one.row[0]), one.row[1], one.row[2], one.row[3]) for one in stored]
    if rng.random() < hostile:  # a map that is not there, or ends beyond the memory
        maps = [(0, least), (-1, least), (-4096, 1 << 62), (4096, -1), (4096, -(1 << 63)), (0, 0)]
        shards.append((-1, *rng.choice(maps), 0))
        which[rng.randrange(n_items)] = len(shards) - 1
    unverified = [rng.random() < 0.7 for _ in range(n_items)] if rng.random() < 0.7 else None
    places = [number(usual[item]) for item in range(n_items)]
    targets = [array for array, _ in arrays]
    call = Call(n_items, shards, which, begins, members, one_each, targets, places, unverified)
    return call, [kept for _, kept in arrays]


@needs_c
@pytest.mark.parametrize("seed", range(4))
def test_any_numbers_are_copied_or_refused_as_python_says(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    stored = [Stored(tmp_path / str(n), size) for n, size in enumerate((mmap.PAGESIZE, 2 * mmap.PAGESIZE, 1024))]
    seen = [0, 0]
    for _ in range(1500):
        call, _kept = make_call(rng, stored)
        n_valid = call.n_valid()
        images = [bytearray(len(target)) for target in call.targets]
        sums = np.zeros((len(call.targets), call.n_items), np.uint64)
        for item in range(n_valid):
            shard = call.which[item]
            extent = stored[shard].content[call.begins[item] :] if shard < len(stored) else b""
            for n, (begin, data, size, end) in enumerate(call.members_of(item)):
                if call.unverified is not None and call.unverified[item]:
                    sums[n, item] = xxhash.xxh3_64_intdigest(extent[begin:end])
                first = call.places[item] * (1 if call.one_each else size)
                images[n][first : first + size] = extent[data : data + size]
        done = n_valid == call.n_items
        assert call.run(None if call.unverified is None else sums) == (n_valid, -1 if done else INVALID)
        assert [target.tobytes() for target in call.targets] == [bytes(image) for image in images]
        seen[done] += 1
    assert min(seen) > 100  # both kinds were tried


@needs_c
@pytest.mark.parametrize("n_items", [0, -1, -(1 << 63)])
@pytest.mark.parametrize("n_members", [0, -1, 1])
def test_no_items_and_no_members(n_items: int, n_members: int) -> None:
    wrong = ctypes.c_int64()
    library = compiled.library()
    zeros = np.zeros(4, np.int64).ctypes.data
    for one_each in (0, 1):
        arguments = (n_items, 0, zeros, zeros, zeros, n_members, zeros, one_each, zeros, zeros, None, None, 0)
        assert library.penstock_copy(*arguments, ctypes.byref(wrong)) == 0
        arguments = (3, 1, zeros, zeros, zeros, min(0, n_members), zeros, one_each, zeros, zeros, None, None, 0)
        assert library.penstock_copy(*arguments, ctypes.byref(wrong)) == 0
        assert wrong.value == INVALID


@needs_c
@pytest.mark.parametrize("room", [-1, -(1 << 63)])
@pytest.mark.parametrize("one_each", [0, 1])
def test_targets_of_a_negative_size(tmp_path: Path, room: int, one_each: int) -> None:
    stored, wrong = Stored(tmp_path / "a", mmap.PAGESIZE), ctypes.c_int64()
    tables = [np.array(table) for table in ([stored.row], [(0, 0, 100, 512)], [(4096, room)], [0])]
    shards, members, targets, zero = (table.ctypes.data for table in tables)
    arguments = (1, 1, shards, zero, zero, 1, members, one_each, targets, zero, None, None, 0, ctypes.byref(wrong))
    assert (compiled.library().penstock_copy(*arguments), wrong.value) == (0, INVALID)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("file", [*EXTREME, -2, 1 << 20])
def test_a_descriptor_that_is_none_counts_as_changed(file: int) -> None:
    assert native.find_changed_shards(np.array([[file, 0, 0, 0]])).tolist() == [True]
