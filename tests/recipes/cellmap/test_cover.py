"""Validation: patches side by side that cover every voxel, whatever the shapes, scales and borders."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_cellmap_parts import (
    CLASSES,
    INPUTS,
    LABEL_AT,
    LABEL_SHAPE,
    SCALE,
    cell,
    check,
    write_cell,
    write_image,
)

from penstock.core.errors import OptionError
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.tiles import covering_places

NUMBERED = np.arange(1, 1 + math.prod(LABEL_SHAPE)).reshape(LABEL_SHAPE).astype("f4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cell")
    write_cell(path)
    # Labels are voxel numbers, so that patches show which voxels they hold.
    write_image(path / "labels" / "numbers", NUMBERED, at=LABEL_AT)
    return path


def numbered(folder: Path, shape: tuple[int, ...], raw: tuple[int, ...], *, pad: bool) -> CellMapDataset:
    scale = (SCALE,) * len(shape)
    return CellMapDataset(
        f"{folder}/em",
        f"{folder}/labels/numbers",
        ["numbers"],
        {"raw": {"shape": raw, "scale": scale}},
        {"gt": {"shape": shape, "scale": scale}},
        pad=pad,
    )


def seen(dataset: CellMapDataset) -> tuple[set[int], int]:
    """Return the numbers of all voxels that come in validation, and how many patches there were."""
    loader = CellMapDataLoader(dataset, batch_size=7, is_train=False)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert [item for batch in batches for item in batch["idx"].tolist()] == sorted(dataset.validation_indices)
    values = np.concatenate([batch["gt"].numpy().ravel() for batch in batches])
    return set(values[~np.isnan(values)].astype(int)), sum(len(batch["idx"]) for batch in batches)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("shape", [(5, 6, 8), (4, 5, 7), (1, 1, 16), (10, 12, 16), (3, 12, 1), (6, 6), (5, 7)], ids=str)
def test_the_union_of_all_patches_is_every_voxel(folder: Path, shape: tuple[int, ...], pad: bool) -> None:
    found, count = seen(numbered(folder, shape, shape, pad=pad))
    assert found == set(range(1, 1 + NUMBERED.size))
    patches = [-(-size // length) for size, length in zip(LABEL_SHAPE, (1, *shape)[-3:], strict=True)]
    assert count == math.prod(patches)  # and none in excess


@few_cases
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 15), st.integers(1, 20)),
    raw=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)
def test_with_padding_no_other_array_keeps_patches_from_the_border(
    folder: Path, shape: tuple[int, ...], raw: tuple[int, ...]
) -> None:
    # Odd beside even: centers lie on the voxels of one of the two, and between those of the other.
    found, _ = seen(numbered(folder, shape, raw, pad=True))
    assert found == set(range(1, 1 + NUMBERED.size))


def test_a_volume_smaller_than_the_patch_is_one_patch_in_its_middle(folder: Path) -> None:
    dataset = numbered(folder, (14, 14, 20), (14, 14, 20), pad=True)
    assert seen(dataset) == (set(range(1, 1 + NUMBERED.size)), 1)
    (item,) = dataset.validation_indices
    patch = dataset[item]["gt"][0].numpy()
    np.testing.assert_array_equal(patch[2:-2, 1:-1, 2:-2], NUMBERED)
    assert np.isnan(patch).sum() == patch.size - NUMBERED.size


def test_without_padding_all_that_any_patch_reaches_is_covered(folder: Path) -> None:
    dataset = numbered(folder, (2, 4, 4), (10, 12, 14), pad=False)
    reached = {int(value) for item in range(len(dataset)) for value in dataset[item]["gt"].numpy().ravel()}
    assert seen(dataset)[0] == reached
    assert len(reached) < NUMBERED.size  # the larger input does not fit near the border


def test_patches_of_validation_are_slices(folder: Path) -> None:
    dataset = cell(folder)
    for batch in CellMapDataLoader(dataset, classes=CLASSES, batch_size=5, is_train=False, drop_last=True):
        assert len(check(batch, dataset)) == 5
    blocks = dataset.validation_blocks()
    assert [int(blocks[place]["idx"]) for place in range(len(blocks))] == dataset.validation_indices


def test_indices_cover_with_patches_of_any_size_and_gaps_are_refused(folder: Path) -> None:
    dataset = cell(folder)
    assert dataset.get_indices({}) == [
        int(dataset.volume.item_of([[z, y, x]])[0]) for z in range(10) for y in range(12) for x in range(16)
    ]
    with pytest.raises(OptionError, match="must be among z, y, x, got t"):
        dataset.get_indices({"t": 8})
    with pytest.raises(OptionError, match="leave gaps"):
        dataset.get_indices({"x": 4})
    coarse = cell(
        folder,
        input_arrays=INPUTS | {"far": {"shape": (3, 3, 3), "scale": (16, 16, 16)}},
        target_arrays={"gt": {"shape": (1, 1, 1), "scale": (8, 8, 8)}},
    )
    with pytest.raises(OptionError, match="leave gaps"):
        coarse.validation_indices  # noqa: B018  # it is what is asked for


@given(
    voxels=st.integers(1, 40),
    tile=st.integers(1, 45),
    offset=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    begin=st.integers(0, 10),
    missing=st.integers(0, 10),
)
def test_places_cover_all_that_centers_reach_with_as_few_patches_as_possible(
    voxels: int, tile: int, offset: float, begin: int, missing: int
) -> None:
    count = max(1, voxels - begin - missing)
    origin = begin + offset
    places = covering_places("x", (0, voxels), tile, (origin, 1.0, count))
    assert (np.diff(places) > 0).all()
    assert 0 <= places[0] <= places[-1] < count

    def reached(chosen: np.ndarray) -> set[float]:
        grid = np.arange(-200, 400) / 4 + 0.125  # points between all borders
        inside = (grid[:, None] > origin + chosen - tile / 2) & (grid[:, None] < origin + chosen + tile / 2)
        return set(grid[inside.any(axis=1) & (grid > 0) & (grid < voxels)])

    assert reached(places) == reached(np.arange(count))
    low, high = max(0, origin - tile / 2), min(voxels, origin + count - 1 + tile / 2)
    assert len(places) <= max(0, math.ceil((high - low) / tile)) + 1
