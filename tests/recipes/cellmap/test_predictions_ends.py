"""How a write ends: complete, refused, interrupted, on a full disk, or killed at any moment and resumed."""

import json
import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_test_killer import Killer, start_killer

from penstock.core.errors import OptionError, ResumeError, WriteError
from penstock.recipes.cellmap.predictions import CellMapDatasetWriter

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
SHAPE, PATCH = (13, 20, 17), {"shape": (6, 8, 8), "scale": (8, 4, 4)}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("raw") / "em"
    data = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    group = zarr.create_group(path, zarr_format=2)
    group.create_array("s0", data=data, chunks=(7, 5, 6))
    transformations = [{"type": "scale", "scale": [8.0, 4.0, 4.0]}]
    datasets = [{"path": "s0", "coordinateTransformations": transformations}]
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    return str(path)


def writer(raw: str, out: Path, **options: Any) -> CellMapDatasetWriter:
    classes = options.pop("classes", ["mito", "er"])
    return CellMapDatasetWriter(raw, f"{out}/[mito,er]", classes, {"raw": PATCH}, {"gt": PATCH}, **options)


def stored(path: Path) -> np.ndarray:
    return np.asarray(zarr.open_array(str(path / "s0"), mode="r")[...])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def filled(made: CellMapDatasetWriter, *, start: float = 0) -> dict[int, float]:
    """Write another number into each patch; return them."""
    numbers = {item: start + place for place, item in enumerate(made.writer_indices)}
    for item, number in numbers.items():
        made[item] = {"gt": number}
    return numbers


def test_an_existing_image_stays_until_the_new_one_is_complete(raw: str, tmp_path: Path) -> None:
    with writer(raw, tmp_path) as made:
        filled(made)
    old = tree(tmp_path)
    with pytest.raises(OptionError, match=r"mito already exists\. Use overwrite=True"):
        writer(raw, tmp_path)
    assert tree(tmp_path) == old
    with pytest.raises(ZeroDivisionError), writer(raw, tmp_path, overwrite=True) as made:
        1 // int(0 * len(filled(made, start=100)))
    assert {name: content for name, content in tree(tmp_path).items() if ".writing" not in name} == old
    with pytest.raises(WriteError, match=r"unfinished write of .*mito\. Resume it with resume=True"):
        writer(raw, tmp_path)
    with pytest.raises(OptionError, match="mito already exists"):  # resuming does not mean replacing
        writer(raw, tmp_path, resume=True)
    with writer(raw, tmp_path, overwrite=True, resume=True) as made:
        assert made.remaining_indices == []
    assert stored(tmp_path / "mito").min() == 100
    with writer(raw, tmp_path, overwrite=True, resume=True) as made:  # nothing is unfinished: starts over
        assert len(made.remaining_indices) == len(made.blocks)
        filled(made, start=50)
    assert stored(tmp_path / "mito").min() == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["er", "mito"]


def test_resuming_continues_with_the_missing_patches(raw: str, tmp_path: Path) -> None:
    made = writer(raw, tmp_path, resume=True)
    items = made.writer_indices
    made[items[:5]] = {"gt": 1.0}
    made[items[5:7]] = {"mito": 2.0}
    with pytest.raises(WriteError, match="Another writer is at work"):
        writer(raw, tmp_path, resume=True)
    with pytest.raises(WriteError, match=rf"{len(items) - 5} of {len(items)} are missing, first idx {items[5]}"):
        made.finalize()
    made.close()
    with pytest.raises(WriteError, match="was closed"):
        made.finalize()
    with pytest.raises(WriteError, match="finished or closed"):
        made[items[:1]] = {"gt": 1.0}
    with pytest.raises(ResumeError, match=r"dtype must be float32, got uint8"):
        writer(raw, tmp_path, resume=True, dtype="uint8")
    chunks = sorted((tmp_path / ".er.writing" / "image" / "s0").glob("*/*/*"))
    assert len(chunks) == 5
    for chunk in (chunks[0], chunks[-1]):  # the last one is at the border
        chunk.write_bytes(chunk.read_bytes()[:-1])  # as a power cut may leave it
    again = writer(raw, tmp_path, resume=True)
    torn = set(again.remaining_indices) - set(items[5:])
    assert len(torn) == 2
    assert sum(len(batch["idx"]) for batch in again.loader(batch_size=4)) == len(items) - 3
    again[sorted(torn)] = {"er": 1.0}
    again[items[5:]] = {"gt": 3.0}
    again.finalize()
    again.finalize()
    assert set(stored(tmp_path / "mito").ravel().tolist()) == {1.0, 3.0}
    with writer(raw, tmp_path, resume=True) as finished:
        assert finished.remaining_indices == []
    assert list(finished.loader(batch_size=2)) == []


def test_missing_patches_may_be_left_unknown(raw: str, tmp_path: Path) -> None:
    for fill in ("float32", "uint8"):
        out = tmp_path / fill
        made = writer(raw, out, dtype=fill)
        made[made.writer_indices[0]] = {"gt": 7}
        made.finalize(missing="fill")
        values = stored(out / "mito")
        assert np.all(values[:6, :8, :8] == 7)
        rest = values[6:]
        assert np.isnan(rest).all() if fill == "float32" else not rest.any()


def test_a_full_disk_leaves_only_complete_patches(raw: str, tmp_path: Path) -> None:
    made = writer(raw, tmp_path)
    items = made.writer_indices
    made[items[:3]] = {"gt": 1.0}
    before = tree(tmp_path)
    noise = np.random.default_rng(0).standard_normal((2, 6, 8, 8)).astype(np.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(WriteError, match=r"Could not write .*mito\.writing/image/s0/.*File too large"):
            made[items[0]] = {"gt": noise}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tree(tmp_path) == before
    made[items] = {"gt": 2.0}
    made[items[0]] = {"gt": noise}
    made.finalize()
    assert np.isin(noise[0], stored(tmp_path / "mito")).all()


def test_a_writer_that_cannot_begin_all_images_begins_none(raw: str, tmp_path: Path) -> None:
    other = writer(raw, tmp_path, classes=["er"])
    with pytest.raises(WriteError, match="Another writer is at work"):
        writer(raw, tmp_path, resume=True)
    with pytest.raises(WriteError, match="unfinished write"):
        writer(raw, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".er.writing"]
    with writer(raw, tmp_path, classes=["mito"]) as made:  # another class is another image
        filled(made)
    other.close()
    with writer(raw, tmp_path, classes=["er"], resume=True) as made:
        filled(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["er", "mito"]


def test_a_lock_ends_with_its_writer_and_attributes_are_small(raw: str, tmp_path: Path) -> None:
    filled(writer(raw, tmp_path, resume=True))
    # That writer is gone, and its lock with it.
    with writer(raw, tmp_path, resume=True) as made:
        assert made.remaining_indices == []
    assert len(json.dumps(zarr.open_group(str(tmp_path / "er"), mode="r").attrs.asdict())) < 2000


SCRIPT = """
import os
from penstock_test_killer import serve
from penstock.recipes.cellmap.predictions import CellMapDatasetWriter

PATCH = {"shape": (6, 8, 8), "scale": (8, 4, 4)}

def write(raw, out):
    whole = os.write
    os.write = lambda handle, content: whole(handle, content[: max(len(content) // 2, 256)])  # and the rest next time
    bounds = {"gt": {"z": [0, 64], "y": [0, 64], "x": [0, 32]}}
    with CellMapDatasetWriter(raw, out + "/[mito,er]", ["mito", "er"], {"raw": PATCH}, {"gt": PATCH}, bounds,
                              overwrite=True) as writer:
        for batch in writer.loader(batch_size=1):
            writer[batch["idx"]] = {"mito": batch["raw"] + 100_000, "er": -batch["raw"]}

serve(write)
"""


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with start_killer(SCRIPT) as killer:
        yield killer


def test_a_killed_writer_leaves_the_old_or_the_new_image_and_can_be_resumed(
    raw: str, killer: Killer, tmp_path: Path
) -> None:
    bounds = {"gt": {"z": [0, 64], "y": [0, 64], "x": [0, 32]}}
    expected = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)[:8, :16, :8]
    with writer(raw, tmp_path / "whole", target_bounds=bounds) as made:
        items = made.writer_indices
        for batch in made.loader(batch_size=1):
            made[batch["idx"]] = {"mito": batch["raw"] + 100_000, "er": -batch["raw"]}
    new = {label: arrays(tmp_path / "whole" / label) for label in ("mito", "er")}
    assert np.array_equal(new["mito"]["s0"], expected + 100_000)
    with writer(raw, tmp_path / "old", target_bounds=bounds) as made:
        filled(made)
    old = {label: arrays(tmp_path / "old" / label) for label in ("mito", "er")}
    total = killer.run(raw=raw, out=str(tmp_path / "alive"))["count"]
    begun, redone = 0, set()
    for at in range(1, total) if SOAK else {*range(9, total, total // 12), total - 9, total - 5, total - 1}:
        out = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", out)
        assert killer.run(raw=raw, out=str(out), at=at)["killed"]
        for label in ("mito", "er"):
            places = (out / label, out / f".{label}.writing" / "replaced")
            there = [arrays(place) for place in places if place.exists()]
            assert any(same(found, which[label]) for found in there for which in (old, new)), (at, label)
        with writer(raw, out, target_bounds=bounds, overwrite=True, resume=True) as made:
            left = made.remaining_indices
            assert set(left) <= set(items)
            begun += len(left) < len(items)
            redone.add(len(left))
            for batch in made.loader(batch_size=2):
                made[batch["idx"]] = {"mito": batch["raw"] + 100_000, "er": -batch["raw"]}
        for label in ("mito", "er"):
            assert same(arrays(out / label), new[label]), (at, label)
        assert sorted(path.name for path in out.iterdir()) == ["er", "mito"]
    assert begun > 2
    assert len(redone) > 2


def arrays(image: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(array[...]) for name, array in zarr.open_group(str(image), mode="r").arrays()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return set(one) == set(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)
