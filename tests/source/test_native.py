"""The copy in C and in NumPy: bytes go to the right place, sums are those of xxhash, a fault ends only the copy."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from penstock_native import needs_c, use_numpy

from penstock.core.errors import PenstockError
from penstock.source import native
from penstock.source.native import (
    INVALID,
    ExpectedChecksums,
    FileMap,
    StoredItems,
    compiled,
    copy_items,
    find_changed_shards,
)

SOURCE = Path(native.__file__).parents[1] / "native.c"
WIDTHS = (64, 256)
STREAMED = ("-DSTREAMED_BATCH=0", "-DSTREAMED_MEMBER=0", "-DSTORE_TRIALS=-1u")  # every second copy, for ever


IN_C = [
    pytest.param((width, flags), marks=needs_c, id=f"{width}{flags}") for width in WIDTHS for flags in ((), STREAMED)
]


@pytest.fixture(scope="module", params=[pytest.param(None, id="numpy"), *IN_C])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reads with NumPy, or with a library for a SIMD width, or one whose every second copy uses non-temporal stores."""
    if request.param is None:
        with use_numpy():
            yield
        return
    path, (width, more) = tmp_path_factory.mktemp("native") / "libnative.so", request.param
    flags = ["-O3", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-DWIDEST_BITS={width}", *more]
    subprocess.run([*os.environ.get("CC", "cc").split(), *flags, "-o", str(path), str(SOURCE)], check=True)
    used = compiled.declare_functions(compiled.open_library(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: used)
        yield


@needs_c
@pytest.mark.parametrize("library", [(64, ()), (256, ())], indirect=True, ids=str)
def test_the_library_says_which_version_of_the_checksum_it_runs(library: None, request: pytest.FixtureRequest) -> None:
    width = request.node.callspec.params["library"][0]
    has_avx2 = " avx2 " in f"{Path('/proc/cpuinfo').read_text()} ".replace("\n", " ")
    assert native.checksum_version() == ("avx2" if width == 256 and has_avx2 else "portable")


class Stored:
    """A file of random bytes, mapped."""

    def __init__(self, path: Path, n_bytes: int, seed: int = 0) -> None:
        self.content = np.random.default_rng(seed).integers(0, 256, n_bytes).astype(np.uint8)
        path.write_bytes(self.content.tobytes())
        self.path, self.file = path, os.open(path, os.O_RDONLY)
        self.mapped = FileMap(self.file, n_bytes)

    @property
    def row(self) -> tuple[int, int, int, int]:
        return self.file, self.mapped.address, self.mapped.n_bytes, os.fstat(self.file).st_ctime_ns

    def close(self) -> None:
        os.close(self.file)


def aligned(n_items: int, n_bytes: int) -> np.ndarray:
    """Rows of zeros; the first one is aligned to a cache line."""
    whole = np.zeros(n_items * n_bytes + 64, np.uint8)
    return whole[-whole.ctypes.data % 64 :][: n_items * n_bytes].reshape(n_items, n_bytes)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Adjacent members: header, data of any size at any offset, padding."""
    members, end = [], 0
    step = draw(st.sampled_from([1, 64]))  # whole lines are streamed, others not
    for _ in range(draw(st.integers(1, 3))):
        head, n_bytes = step * draw(st.integers(1, 700 // step)), step * draw(st.integers(0, 3000 // step))
        least = max(0, 241 - head - n_bytes)
        after = draw(st.integers(least, least + 600))
        members.append((end, end + head, n_bytes, end + head + n_bytes + after))
        end = members[-1][3]
    return members


@given(members=layouts(), n_items=st.integers(1, 9), data=st.data())
def test_any_layout_is_copied_and_verified(
    library: None,
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[int, int, int, int]],
    n_items: int,
    data: st.DataObject,
) -> None:
    folder, length, seed = tmp_path_factory.mktemp("shards"), members[-1][3], data.draw(st.integers(0, 1 << 30))
    stored = [Stored(folder / str(n), length + 500, seed + n) for n in range(2)]
    which = np.array(data.draw(st.lists(st.integers(0, 1), min_size=n_items, max_size=n_items)))
    begins = np.array(data.draw(st.lists(st.integers(0, 500), min_size=n_items, max_size=n_items)))
    unverified = np.array(data.draw(st.lists(st.booleans(), min_size=n_items, max_size=n_items)))
    rows = np.random.default_rng(seed).permutation(n_items)
    targets = [aligned(n_items, member[2]) for member in members]
    sums = np.zeros((len(members), n_items), np.uint64)
    for item, (shard, begin) in enumerate(zip(which, begins, strict=True)):
        extent = stored[shard].content[begin : begin + length]
        for number, (head, _, _, end) in enumerate(members):
            if unverified[item]:  # the others are not verified
                sums[number, item] = xxhash.xxh3_64_intdigest(extent[head:end].tobytes())

    def copy() -> tuple[int, int]:
        return copy_items(
            StoredItems(np.array([one.row for one in stored]), which, begins),
            np.array(members),
            targets=targets,
            places=rows,
            expected=ExpectedChecksums(unverified, sums),
        )

    assert copy() == (n_items, -1)
    for shard, begin, row in zip(which, begins, rows, strict=True):
        extent = stored[shard].content[begin : begin + length]
        for number, (_, start, n_bytes, _) in enumerate(members):
            assert targets[number][row].tobytes() == extent[start : start + n_bytes].tobytes()
    if unverified.any():
        item = data.draw(st.sampled_from(np.flatnonzero(unverified).tolist()))
        member = data.draw(st.integers(0, len(members) - 1))
        sums[member, item] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
        assert copy() == (item, member)
    for one in stored:
        one.close()


@given(members=st.lists(layouts().map(lambda members: members[0]), min_size=1, max_size=9), data=st.data())
def test_members_of_different_sizes_are_copied_and_verified(
    library: None,
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[int, int, int, int]],
    data: st.DataObject,
) -> None:
    seed, n_items = data.draw(st.integers(0, 1 << 30)), len(members)
    stored = Stored(tmp_path_factory.mktemp("shards") / "a", max(member[3] for member in members) + 500, seed)
    begins = np.array(data.draw(st.lists(st.integers(0, 500), min_size=n_items, max_size=n_items)))
    unverified = np.array(data.draw(st.lists(st.booleans(), min_size=n_items, max_size=n_items)))
    extents = [stored.content[begin:][: member[3]] for begin, member in zip(begins, members, strict=True)]
    sums = np.array([xxhash.xxh3_64_intdigest(extent.tobytes()) for extent in extents], np.uint64)
    sizes = np.array([member[2] for member in members])
    target = np.zeros(sizes.sum(), np.uint8)

    def copy() -> tuple[int, int]:
        return copy_items(
            StoredItems(np.array([stored.row]), np.zeros(n_items, np.int64), begins),
            np.array(members),
            targets=[target],
            places=sizes.cumsum() - sizes,
            expected=ExpectedChecksums(unverified, sums[None]),
            one_each=True,
        )

    assert copy() == (n_items, -1)
    payloads = [extent[start:][:n_bytes] for extent, (_, start, n_bytes, _) in zip(extents, members, strict=True)]
    assert target.tobytes() == b"".join(payload.tobytes() for payload in payloads)
    broken = data.draw(st.integers(0, n_items - 1))
    sums[broken] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    assert copy() == ((broken, 0) if unverified[broken] else (n_items, -1))
    os.truncate(stored.path, 0)
    touched = np.flatnonzero(unverified | (sizes > 0))
    assert copy() == (touched[0] if len(touched) else n_items, -1)
    stored.close()


TOGGLING = """
import mmap, os, sys
path, first, step = sys.argv[1], *map(int, sys.argv[2:])
parent = os.getppid()
with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as written:
    places = [(place, written[place], written[place] ^ 1) for place in range(first, len(written), step)]
    print("begun", flush=True)
    while os.getppid() == parent:  # stops if the test is killed at its time limit
        for place, right, wrong in places:
            written[place] = wrong
            written[place] = right
"""


def test_the_bytes_verified_are_the_bytes_copied_while_another_process_writes_to_the_file(
    library: None, tmp_path: Path
) -> None:
    n_items, n_bytes, length = 16, 8192, 8704
    stored = Stored(tmp_path / "a", n_items * length)
    extents = [stored.content[length * n : length * (n + 1)].tobytes() for n in range(n_items)]
    expected = ExpectedChecksums(
        np.ones(n_items, bool),
        np.array([[xxhash.xxh3_64_intdigest(extent) for extent in extents]], np.uint64),
    )
    target, refused = aligned(n_items, n_bytes), 0
    command = [sys.executable, "-S", "-c", TOGGLING, str(stored.path), "640", str(length)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer, contextlib.ExitStack() as ending:
        ending.callback(writer.kill)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        while refused < 200:
            target[:] = 0
            n_copied, wrong = copy_items(
                StoredItems(np.array([stored.row]), np.zeros(n_items, np.int64), np.arange(n_items) * length),
                np.array([[0, 512, n_bytes, length]]),
                targets=[target],
                places=np.arange(n_items),
                expected=expected,
            )
            refused += wrong == 0
            for item in range(n_copied):
                assert target[item].tobytes() == extents[item][512:]
    stored.close()


MEMBERS = np.array([[0, 512, 4000, 4608]])


def copy_unverified(stored: Stored, begins: list[int]) -> tuple[int, np.ndarray]:
    target = np.zeros((len(begins), 4000), np.uint8)
    n_copied, wrong = copy_items(
        StoredItems(np.array([stored.row]), np.zeros(len(begins), np.int64), np.array(begins)),
        MEMBERS,
        targets=[target],
        places=np.arange(len(begins)),
        expected=None,
    )
    assert wrong in (-1, INVALID)
    return n_copied, target


def test_an_item_outside_of_its_shard_is_not_read(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "a", 3 * 4608)
    for outside in (-1, -(1 << 62), 2 * 4608 + 1, 3 * 4608, 1 << 62):
        found, target = copy_unverified(stored, [4608, outside, 0])
        assert found == 1
        assert target[0].tobytes() == stored.content[4608 + 512 :][:4000].tobytes()
        assert not target[1:].any()
    assert copy_unverified(stored, [2 * 4608])[0] == 1
    stored.close()


def test_a_file_that_shrinks_under_its_map_ends_the_copy(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "a", 20 * 4608)
    begins = [4608 * number for number in range(20)]
    os.truncate(stored.path, 8192)
    for _ in range(3):
        found, target = copy_unverified(stored, begins)
        assert found == 1  # the second one ends in the third page, which is gone
        assert target[0].tobytes() == stored.content[512:4512].tobytes()
    stored.path.write_bytes(stored.content.tobytes())
    assert copy_unverified(stored, begins)[0] == 20
    stored.close()


def test_threads_that_fault_at_once_each_return_their_own_count(tmp_path: Path) -> None:
    stores = [Stored(tmp_path / str(n), 40 * 4608, seed=n) for n in range(4)]
    for number, stored in enumerate(stores):
        os.truncate(stored.path, 4608 * 8 * number + 4096)
    found: dict[int, set[int]] = {number: set() for number in range(4)}

    def work(number: int) -> None:
        for _ in range(200):
            found[number].add(copy_unverified(stores[number], [4608 * item for item in range(40)])[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # In a map, the rest of the last page reads as zeros.
    page = 4096 if native.is_compiled() else 1
    ends = [-(-(4608 * 8 * number + 4096) // page) * page // 4608 for number in range(4)]
    assert found == {number: {end} for number, end in enumerate(ends)}
    for stored in stores:
        stored.close()


def write_in_place(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as copying programs do


def grow_and_shrink(path: Path) -> None:
    n_bytes = path.stat().st_size
    os.truncate(path, n_bytes + 1)
    os.truncate(path, n_bytes)


def replace(path: Path) -> None:
    path.with_name("new").write_bytes(b"other")
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [write_in_place, grow_and_shrink, replace, Path.unlink])
def test_only_a_file_that_was_written_to_counts_as_changed(
    library: None, tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    stored = [Stored(tmp_path / str(n), 1000, n) for n in range(4)]
    table = np.array([one.row for one in stored])
    assert find_changed_shards(table).tolist() == [False] * 4
    assert find_changed_shards(table[:0]).tolist() == []
    change(stored[2].path)
    assert find_changed_shards(table).tolist() == [False, False, True, False]
    for one in stored:
        one.close()


FAULTS = """
import ctypes, faulthandler, mmap, os, signal, sys
import numpy as np
from penstock.source.native import FileMap, StoredItems, copy_items

def stored(path, n_bytes=1 << 16):
    open(path, "wb").write(bytes(n_bytes))
    return os.open(path, os.O_RDONLY)

def shrunk_copy(path):
    file = stored(path)
    mapped = FileMap(file, 1 << 16)
    os.truncate(path, 0)
    shard, zero = np.array([[file, mapped.address, 1 << 16, 0]]), np.zeros(1, np.int64)
    n_copied, _ = copy_items(
        StoredItems(shard, zero, zero), np.array([[0, 512, 4000, 4608]]), targets=[np.empty((1, 4000), np.uint8)],
        places=zero, expected=None,
    )
    assert n_copied == 0
    print("caught", flush=True)

def fault_elsewhere(path):
    file = stored(path)
    whole = mmap.mmap(file, 1 << 16, prot=mmap.PROT_READ)
    os.truncate(path, 0)
    whole[0]

folder, how = sys.argv[1:]
path = os.path.join(folder, "a")
"""


def run_until_it_ends(tmp_path: Path, how: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAULTS + text, str(tmp_path), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@needs_c
@pytest.mark.parametrize("how", ["nothing", "faulthandler", "torch"])
def test_a_fault_elsewhere_ends_the_process_as_it_would_without_us(tmp_path: Path, how: str) -> None:
    text = """
if how == "torch":
    import torch
    torch._C._set_worker_signal_handlers()
shrunk_copy(path)
if how == "faulthandler":
    faulthandler.enable()  # after ours
    shrunk_copy(path)
fault_elsewhere(path)
"""
    done = run_until_it_ends(tmp_path, how, text)
    assert done.stdout.split() == ["caught"] * (2 if how == "faulthandler" else 1)
    assert done.returncode == -signal.SIGBUS
    if how == "faulthandler":
        assert "Fatal Python error: Bus error" in done.stderr
        assert "in fault_elsewhere" in done.stderr
    if how == "torch":
        assert "insufficient shared memory" in done.stderr


@needs_c
def test_a_sigbus_sent_by_kill_is_not_swallowed(tmp_path: Path) -> None:
    done = run_until_it_ends(
        tmp_path, "sent", "shrunk_copy(path)\nos.kill(os.getpid(), signal.SIGBUS)\nprint('survived')\n"
    )
    assert (done.stdout.split(), done.returncode) == (["caught"], -signal.SIGBUS)


def test_a_missing_library_error_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"Could not load.*C compiler.*pip install"):
        compiled.open_library(tmp_path / "libnative.so")


@needs_c
def test_a_library_of_another_source_is_refused(tmp_path: Path) -> None:
    for name in ("native.c", "libnative.so"):
        (tmp_path / name).write_bytes(SOURCE.with_name(name).read_bytes())
    assert compiled.load(tmp_path).penstock_copy
    (tmp_path / "native.c").write_bytes(SOURCE.read_bytes() + b"\n")
    (tmp_path / "other.c").write_text("const unsigned long penstock_source_digest = 1;")  # without any function
    flags = ["-shared", "-fPIC", "-o", str(tmp_path / "libnative.so.new"), str(tmp_path / "other.c")]
    subprocess.run([*os.environ.get("CC", "cc").split(), *flags], check=True)
    (tmp_path / "libnative.so.new").replace(tmp_path / "libnative.so")
    with pytest.raises(PenstockError, match=r"native\.c has changed since it was compiled"):
        compiled.load(tmp_path)
