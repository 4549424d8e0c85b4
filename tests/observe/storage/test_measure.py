"""Real files are measured: which pieces count, what is bounded, what is left as it was; no bounds on durations."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from penstock_page_cache import cached_pages, can_be_dropped

from penstock.observe.storage import measure, pieces
from penstock.observe.storage.measure import DEPTH, measure_storage

SIZE = 40 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("measured")
    paths = [folder / f"{number}.bin" for number in range(4)]
    for path in paths:
        with path.open("wb") as file:
            file.write(os.urandom(SIZE // 4))
            os.fsync(file.fileno())
    return paths


def drop(paths: list[Path]) -> None:
    if not all(map(can_be_dropped, paths)):
        pytest.skip("this file system keeps the pages of files in memory")


@pytest.mark.parametrize("item_bytes", [1000, 100_000])
def test_files_that_are_not_in_memory_have_figures_and_are_left_that_way(written: list[Path], item_bytes: int) -> None:
    for _ in range(5):  # other programs may take the time, or the pages, of a measurement
        drop(written)
        read = list[int]()
        found = measure_storage(written, item_bytes, read.append)
        left = np.concatenate([cached_pages(path) for path in written])
        if found.unknown == "" and found.n_timed > DEPTH and left.mean() < 0.25:
            break
    assert found.unknown == ""
    assert found.read_bytes == item_bytes
    assert min(found.sequential or 0, found.random_alone or 0, found.random_together or 0) > 0
    assert 0 < (found.fraction_of_sequential(item_bytes) or 0) <= 1
    assert (found.seek_seconds or 0) >= 0
    assert found.n_timed > DEPTH
    assert sum(read) <= measure.MOST_BYTES
    assert left.mean() < 0.25  # some pages are in use while they are given back


def test_files_in_memory_are_unknown_and_have_no_figures(written: list[Path]) -> None:
    for path in written:
        path.read_bytes()
    found = measure_storage(written, 1000)
    if not found.n_timed:  # a busy machine may have dropped some meanwhile
        where = "the file system is" if found.device.is_memory else "what was tried is in the page cache"
        assert found.unknown == f"in memory: {where}"
        assert (found.sequential, found.random_alone, found.random_together) == (None, None, None)
        assert found.n_resident > 0 or found.device.is_memory


def test_few_bytes_special_files_and_nothing_at_all_are_unknown_and_never_an_error(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.iterdir())
    names = ("small", "link", "pipe", ".", "missing")
    for chosen in ([], [tmp_path / name for name in names]):
        found = measure_storage(chosen, 1000)
        is_memory = bool(chosen) and found.device.is_memory
        assert found.unknown.endswith("in memory: the file system is" if is_memory else " MB are too few to measure")
        assert found.sequential is None
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_files_that_shrink_while_they_are_measured_are_no_error(written: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(SIZE))
    drop([path])
    rounds = itertools.count()
    found = measure_storage([path], 1000, lambda _: next(rounds) or os.truncate(path, 0))
    assert found.n_timed >= 0  # whatever was read before
    assert found.unknown or found.sequential


def test_a_file_system_in_memory_is_not_measured() -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("this system has no /dev/shm")
    path = folder / f"penstock-test-{os.getpid()}"
    path.write_bytes(bytes(SIZE))
    try:
        found = measure_storage([path], 1000)
    finally:
        path.unlink()
    assert found.unknown == "in memory: the file system is"
    assert (found.device.is_memory, found.n_timed) == (True, 0)


def test_a_file_system_without_reads_that_do_not_wait_asks_the_kernel_which_pages_it_has(
    written: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written[0]
    drop([path])
    monkeypatch.setattr(pieces, "_NOWAIT", 0)
    with path.open("rb") as file:
        piece = (file.fileno(), 8192, 12288)
        assert pieces.time_pieces([piece], 2).pieces == (piece,)
        assert pieces.time_pieces([piece], 2).n_resident == 0  # asking reads nothing, and one is too few to be read
        os.pread(file.fileno(), 4096, 8192)
        assert pieces.time_pieces([piece], 1) == pieces.Timed(None, (), 1)


def test_runs_go_on_in_the_next_file_and_places_lie_within_files() -> None:
    places = measure._Places([(3, 1000), (4, 5000), (5, 2000)])
    for handle, begin, end in itertools.islice(places.draw(1500), 100):
        assert handle in (4, 5)
        assert 0 <= begin < end <= {4: 5000, 5: 2000}[handle]
        assert end - begin == 1500
    assert list(places.draw(6000)) == []
    for _ in range(100):
        run = places.draw_run(3000)
        assert all(first[0] + 1 == second[0] and second[1] == 0 for first, second in itertools.pairwise(run))
        assert 0 < sum(end - begin for _, begin, end in run) <= 3000
