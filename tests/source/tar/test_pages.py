"""What TarSource asks the kernel for ahead of a read, and gives back after it."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from penstock_page_cache import cached_pages, can_be_dropped
from penstock_test_parts import eventually, run_isolated
from penstock_test_shards import member_places, write

from penstock import Concat, DamageError, Loader, Plan, Sequential, Source, TarSource, Zip
from penstock.source.tar import engine

N_ITEMS, PER_SHARD = 24, 8
PAGE = os.sysconf("SC_PAGE_SIZE")


def make_set(folder: Path, n_values: int = 100_000, **options: object) -> list[Path]:
    """Write items of one large field each, with the item's number as its value; return the shards."""
    samples = [{"x": np.int64(i), "big": np.full(n_values, i, np.int32)} for i in range(N_ITEMS)]
    write(folder, samples, shard_size=PER_SHARD, **options)
    return sorted(path for path in folder.iterdir() if ".tar" in path.name and "index" not in path.name)


class Pages:
    """Which pages of a dataset are cached. Where they are is found out once, because finding out reads them."""

    def __init__(self, shards: list[Path]) -> None:
        self.folder = shards[0].parent
        self._places = {}
        for number, shard in enumerate(shards):
            found = [place for name, place in member_places(shard).items() if ".big" in name]
            for row, (offset, size) in enumerate(found):
                own = slice(-(-offset // PAGE), (offset + size) // PAGE)  # pages that hold nothing else
                self._places[number * PER_SHARD + row] = (shard, own)
        if not all(can_be_dropped(shard) for shard in shards):
            pytest.skip("the file system of the temporary folder keeps all pages")

    def cached(self, item: int) -> NDArray[np.bool_]:
        """Return which of the pages that hold nothing but the large field of `item` are cached."""
        shard, own = self._places[item]
        return cached_pages(shard)[own]


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(make_set(tmp_path / "set"))


def test_the_items_that_come_are_read_and_no_others(pages: Pages) -> None:
    source = TarSource(pages.folder)
    asked = np.array([21, 3, 9, 3])
    n_bytes = source.prepare(asked)
    assert n_bytes >= 3 * 400_000
    assert eventually(lambda: all(pages.cached(item).all() for item in (3, 9, 21)))
    assert not any(pages.cached(item).any() for item in (0, 6, 14, 17))
    assert eventually(lambda: source.prepare(asked) == 0)
    assert source.take(asked)["x"].tolist() == [21, 3, 9, 3]


def test_only_the_fields_that_are_read(pages: Pages) -> None:
    source = TarSource(pages.folder, fields=["x"])
    source.prepare(np.arange(N_ITEMS))
    assert source.take(np.arange(N_ITEMS))["x"].tolist() == list(range(N_ITEMS))
    assert not any(pages.cached(item)[50:-50].any() for item in range(N_ITEMS))


@pytest.mark.parametrize(
    "join", [Concat, lambda parts: Zip([parts[0].with_fields(["big"]), parts[1].with_fields(["x"])])]
)
def test_a_remote_source_beside_it_costs_a_local_one_no_pages(
    join: Callable[[list[TarSource]], Source], pages: Pages, tmp_path: Path
) -> None:
    make_set(tmp_path / "there")
    source = join([TarSource(pages.folder), TarSource(f"file://{tmp_path / 'there'}")])
    with Loader(source, Plan(source.index, Sequential(), batch_size=4)) as loader:
        n_items = sum(len(batch["big"]) for batch in loader)
    assert n_items == len(source.index)
    assert all(pages.cached(item).all() for item in range(N_ITEMS))


def test_items_are_given_back_after_they_were_read(pages: Pages) -> None:
    source = TarSource(pages.folder)
    assert source.take(np.arange(N_ITEMS))["big"][:, 7].tolist() == list(range(N_ITEMS))
    source.release(np.array([2, 20, 10]))
    for item in range(N_ITEMS):
        # What the kernel treats as one page may be several: those at the ends may stay.
        assert pages.cached(item)[48:49].all() == (item not in (2, 10, 20))
    assert source.take(np.array([20, 2, 10]))["big"][:, 7].tolist() == [20, 2, 10]


def test_small_items_are_read_in_blocks_if_all_of_them_fit(tmp_path: Path) -> None:
    (shard,) = write_small(tmp_path / "set")
    if not can_be_dropped(shard):
        pytest.skip("the file system of the temporary folder keeps all pages")
    source = TarSource(tmp_path / "set", fields=["x"])
    source.prepare(np.array([0, 1999]))
    assert eventually(lambda: all(cached_pages(shard)[[0, 20, -1]]))
    assert not cached_pages(shard)[len(cached_pages(shard)) // 2]


def test_of_a_data_set_that_does_not_fit_only_the_items_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path / "set")
    monkeypatch.setattr(engine, "this_machine", type("Small", (), {"memory_bytes": 1000}))
    source = TarSource(tmp_path / "set", fields=["x"])
    assert source.prepare(np.array([0])) <= 4096


def write_small(folder: Path) -> list[Path]:
    write(folder, [{"x": np.full(128, i)} for i in range(2000)], shard_size=2000)
    return list(folder.glob("*.tar"))


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip_index(path: Path) -> None:
    index = next(path.parent.glob(f"{path.name}*idx*"), None) or next(path.parent.glob(f"{path.stem}*index*"))
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("damage", [truncate, Path.unlink, replace_by_fifo, flip_index], ids=lambda f: f.__name__)
def test_a_damaged_shard_is_the_matter_of_the_read(
    tmp_path: Path, damage: Callable[[Path], None], opened: bool
) -> None:
    shards = make_set(tmp_path / "set", 2000)
    source = TarSource(tmp_path / "set")
    if opened:
        source.take(np.array([1, 9, 17]))
    damage(shards[1])
    for _ in range(2):
        source.prepare(np.array([9, 0, 12, 23]))
        source.release(np.array([9, 0, 12, 23]))
    assert source.take(np.array([0, 23]))["big"][:, 5].tolist() == [0, 23]
    fresh = TarSource(tmp_path / "set") if damage is not Path.unlink else source
    fresh.close()
    with pytest.raises(DamageError, match=shards[1].name):
        fresh.take(np.array([12]))


def test_compressed_shards_are_left_alone(tmp_path: Path) -> None:
    make_set(tmp_path / "set", 2000, compression="gz")
    source = TarSource(tmp_path / "set")
    assert source.prepare(np.array([9, 0])) == 0
    source.release(np.array([9, 0]))
    assert source.take(np.array([9, 0]))["x"].tolist() == [9, 0]


def test_more_shards_than_stay_open_are_not_opened_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_set(tmp_path / "set", 2000)
    monkeypatch.setattr(engine, "file_limits", lambda: (4, 4))
    source = TarSource(tmp_path / "set")
    source.prepare(np.array([0, 9, 17]))
    assert source._process_engine()._shards.find(0) is None
    source.prepare(np.array([0, 9]))
    assert source._process_engine()._shards.find(0) is not None


def test_after_a_fork_and_in_another_process(pages: Pages) -> None:
    source = TarSource(pages.folder)
    source.prepare(np.array([0, 9, 17]))

    def read_in_a_fork() -> list[int]:
        source.prepare(np.array([4, 12]))
        source.release(np.array([4]))
        return source.take(np.array([4, 12]))["x"].tolist()  # type: ignore[no-any-return]

    assert run_isolated(read_in_a_fork) == [4, 12]
    copy = pickle.loads(pickle.dumps(source))
    copy.prepare(np.array([5]))
    assert copy.take(np.array([5]))["x"].tolist() == [5]
    assert copy.stored_bytes == sum(path.stat().st_size for path in pages.folder.glob("*.tar"))
