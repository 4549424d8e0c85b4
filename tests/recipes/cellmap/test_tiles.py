"""Patches along one axis: they cover every voxel, and lie where a plain computation in fractions says."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.recipes.cellmap.tiles import Voxels, axis_tiles, voxels_between

EIGHTHS = st.integers(1, 40).map(lambda n: n / 8)


@given(
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 20)),
    scale=EIGHTHS,
    centers=st.tuples(EIGHTHS, st.integers(-8, 8), st.integers(1, 120)),
)
def test_patches_cover_every_voxel_or_none_could(sizes, scale, centers) -> None:
    (count, size), (step, shift, n_centers) = sizes, centers
    first, origin = 3.0, 3.0 + shift / 8
    # Where a patch around each center begins: its first voxel is the nearest one, the upper one of two.
    begins = [
        math.floor(
            (Fraction(origin) + place * Fraction(step) - Fraction(first)) / Fraction(scale)
            - Fraction(size - 1, 2)
            + Fraction(1, 2)
        )
        for place in range(n_centers)
    ]
    reached = {voxel for begin in begins for voxel in range(begin, begin + size)}
    # Some voxel is out of reach, or centers are further apart than patches are long.
    may_refuse = not set(range(count)) <= reached or math.ceil(Fraction(step) / Fraction(scale)) > size
    try:
        tiles = axis_tiles("z", Voxels(first, scale, count), size, (origin, step, n_centers))
    except OptionError:
        assert may_refuse
        return
    assert [begins[place] for place in tiles.places] == tiles.begins.tolist()
    covered = [set(range(begin, begin + size)) for begin in tiles.begins.tolist()]
    assert set(range(count)) <= set().union(*covered)
    cells = [range(begin, min(begin + tiles.stride, count)) for begin in range(0, count, tiles.stride)]
    assert len(cells) == len(covered)
    assert all(set(cell) <= patch for cell, patch in zip(cells, covered, strict=True))


@given(count=st.integers(1, 50), size=st.integers(1, 20), odd=st.booleans())
def test_on_a_fine_grid_patches_abut_and_the_last_one_is_moved_inwards(count: int, size: int, odd: bool) -> None:
    origin = (size / 2 if size % 2 == 0 else size // 2 + 0.5) - (0.5 if odd else 0)  # off by half a voxel, or not
    tiles = axis_tiles("x", Voxels(0.5, 1.0, count), size, (origin - 100, 1.0, 300))
    assert tiles.stride == size
    if count >= size:
        assert tiles.begins.tolist() == [min(begin, count - size) for begin in range(0, count, size)]


@given(
    n_stored=st.integers(1, 40),
    scale=EIGHTHS,
    stored_scale=EIGHTHS,
    bounds=st.tuples(st.integers(-10, 400), st.integers(-10, 400)),
)
def test_voxels_are_those_whose_centers_lie_within(n_stored, scale, stored_scale, bounds) -> None:
    low, high = 1.0, 1.0 + n_stored * stored_scale
    edges = (bounds[0] / 8, bounds[1] / 8)
    everything = [1 + (k + 0.5) * scale for k in range(2000) if 1 + (k + 0.5) * scale < high]
    wanted = [1 + (k + 0.5) * scale for k in range(-2000, 2000) if edges[0] <= 1 + (k + 0.5) * scale < edges[1]]
    if not wanted or wanted[0] < 1 or wanted[-1] >= high:
        with pytest.raises(OptionError, match="target_bounds along y must lie within"):
            voxels_between("y", (low, high), scale, edges)
        return
    found = voxels_between("y", (low, high), scale, edges)
    assert [found.first + k * scale for k in range(found.count)] == wanted
    assert voxels_between("y", (low, high), scale, None).count == len(everything)
