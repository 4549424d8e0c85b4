"""Laws of the numbering of centres."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import SourceError
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
