"""Laws of the numbering of centres and of the chunk cache."""

import itertools
import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import SourceError
from penstock.source.volume.cache import ChunkCache
from penstock.source.volume.grid import CentreGrid, centre_borders

layers = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def along_the_curve(block: tuple[int, ...]) -> str:
    """Return the interleaved bits of three numbers."""
    return "".join("".join(digits) for digits in zip(*(f"{number:020b}" for number in block), strict=True))


@given(sizes=st.tuples(layers, layers, layers))
def test_items_are_numbered_tile_by_tile(sizes: tuple[list[int], ...]) -> None:
    borders = tuple(np.cumsum([0, *axis]) for axis in sizes)
    grid = CentreGrid((0, 10, -1), (1, 2, 0.5), borders)
    wanted, blocks = [], []
    for block in sorted(itertools.product(*(range(len(axis)) for axis in sizes)), key=along_the_curve):
        ranges = [range(edges[number], edges[number + 1]) for edges, number in zip(borders, block, strict=True)]
        wanted += list(itertools.product(*ranges))
        blocks.append(len(list(itertools.product(*ranges))))
    items = np.arange(len(wanted))
    assert grid.places(items).tolist() == [list(place) for place in wanted]
    assert grid.items(np.array(wanted)).tolist() == items.tolist()
    assert grid.tile_sizes().tolist() == blocks
    assert grid.centres(np.array(wanted)).tolist() == [[z, 10 + 2 * y, x / 2 - 1] for z, y, x in wanted]


def test_there_are_a_million_tiles_at_most() -> None:
    counts = (3000, 500, 7)
    borders = centre_borders((0, 0, 0), (1, 1, 1), counts, scale=(1, 1, 1), translation=(0, 0, 0), chunk=(1, 1, 1))
    grid = CentreGrid((0, 0, 0), (1, 1, 1), borders)
    assert 1 << 18 < len(grid.tile_sizes()) <= 1 << 20
    assert grid.counts == counts
    items = np.random.default_rng(0).integers(0, np.prod(counts), 1000)
    assert grid.items(grid.places(items)).tolist() == items.tolist()
    with pytest.raises(SourceError, match=r"fewer than .* centres, got"):
        centre_borders((0, 0), (1, 1), (1 << 40, 1 << 30), scale=(1, 1), translation=(0, 0), chunk=(1, 1))


# -- chunks that are kept ----------------------------------------------------------------------------------------------


@given(
    budget=st.integers(0, 60),
    asked=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60),
)
def test_the_most_recently_used_chunks_are_cached_within_the_budget(budget: int, asked: list[tuple[int, bool]]) -> None:
    cache, model, decoded = ChunkCache(budget), OrderedDict[int, int](), 0
    for key, look in asked:
        size = 3 * key + 1  # bytes of chunk `key`
        kept = key in model
        if kept:
            model.move_to_end(key)
        if look:
            assert (cache.find(key) is not None) == kept
            continue
        chunk, fresh = cache.fetch(key, lambda key=key, size=size: (np.full(size, key, np.uint8), 100))
        assert chunk.tolist() == [key] * size
        assert fresh != kept
        decoded += fresh
        if not kept and size <= budget:
            while sum(model.values()) + size > budget:
                model.popitem(last=False)
            model[key] = size
        assert cache.n_bytes == sum(model.values()) <= budget
        assert len(cache) == len(model)
    assert cache.counts == {"chunks_decoded": decoded, "bytes_decoded": 100 * decoded}
    cache.clear()
    assert (len(cache), cache.n_bytes) == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_chunk_in_progress_is_waited_for_and_decoded_again_only_after_a_failure(fails: bool) -> None:
    cache, calls = ChunkCache(100), []
    begun, go = threading.Event(), threading.Event()
    results: dict[str, object] = {}

    def slow() -> tuple[np.ndarray, int]:
        calls.append("first")
        begun.set()
        assert go.wait(10)
        if fails:
            raise OSError("broken")
        return np.ones(4, np.uint8), 4

    def quick() -> tuple[np.ndarray, int]:
        calls.append("second")
        return np.full(4, 2, np.uint8), 4

    def first() -> None:
        try:
            results["first"] = cache.fetch("a", slow)[0].tolist()
        except OSError as error:
            results["first"] = str(error)

    def second() -> None:
        results["second"] = cache.fetch("a", quick)[0].tolist()

    one = threading.Thread(target=first)
    one.start()
    assert begun.wait(10)
    two = threading.Thread(target=second)
    two.start()
    # Another chunk is not held up by this one.
    assert cache.fetch("b", quick)[1]
    go.set()
    one.join()
    two.join()
    if fails:
        assert results == {"first": "broken", "second": [2, 2, 2, 2]}
    else:
        assert results["first"] == results["second"] == [1, 1, 1, 1]
        assert calls.count("first") == 1
        assert calls.count("second") == 1  # of chunk b
