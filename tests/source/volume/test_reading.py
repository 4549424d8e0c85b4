"""How volumes are read: the level, the chunks and how often, the cache, and errors for damage."""

import hashlib
import json
import math
import os
import pickle
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from penstock.core.errors import DamageError, OptionError, ReadError, SourceError
from penstock.core.types import Span
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource


def numbers(*shape: int, dtype: str = "u2", offset: int = 1) -> np.ndarray:
    return (np.arange(math.prod(shape)) + offset).reshape(shape).astype(dtype)


def write(
    path: Path,
    *levels: np.ndarray,
    scale: Sequence[float] = (1, 1, 1),
    translation: Sequence[float] = (0, 0, 0),
    chunks: Sequence[int] = (4, 4, 4),
    **options: Any,
) -> str:
    """Write an image in which each level has twice the scale of the one before, and the same border."""
    datasets = []
    for n, data in enumerate(levels):
        options = {
            "zarr_format": 2,
            "chunks": tuple(min(a, b) for a, b in zip(chunks, data.shape, strict=True)),
        } | options
        zarr.create_array(path / f"s{n}", data=data, **options)
        sizes = [2**n * size for size in scale]
        shifts = [shift + (2**n - 1) * size / 2 for shift, size in zip(translation, scale, strict=True)]
        steps = [{"type": "scale", "scale": sizes}, {"type": "translation", "translation": shifts}]
        datasets.append({"path": f"s{n}", "coordinateTransformations": steps})
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    image = {"version": "0.4", "axes": axes, "datasets": datasets}
    zarr.create_group(path, zarr_format=2, attributes={"multiscales": [image]})
    return str(path)


def cube(path: str, n: int = 4, scale: float = 1, **options: Any) -> VolumeArray:
    return VolumeArray(path, (n, n, n), (scale, scale, scale), **options)


def hashes(folder: Path) -> dict[str, Any]:
    """Return the names, times and contents of the files in a folder."""
    return {
        str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "")
        for file in sorted(folder.rglob("*"))
    }


# -- levels and channels -----------------------------------------------------------------------------------------------


def test_each_array_is_read_from_the_level_of_its_scale(tmp_path: Path) -> None:
    levels = [numbers(16 >> n, 16 >> n, 16 >> n, offset=1 + 5000 * n) for n in range(3)]
    path = write(tmp_path / "a", *levels, scale=(4, 4, 4), translation=(100, 0, 7))
    arrays = {"fine": cube(path, 4, 4), "middle": cube(path, 4, 8), "coarse": cube(path, 2, 16)}
    source = VolumeSource(arrays, pad=False)
    assert source.voxel_size == (16, 16, 16)
    assert source.grid_shape == (3, 3, 3)
    items = np.arange(27)
    block = source.take(items)
    for row, place in enumerate(source.place_of(items)):
        for name, data, n, per in (("fine", levels[0], 4, 4), ("middle", levels[1], 4, 2), ("coarse", levels[2], 2, 1)):
            low = (place + 1) * per - n // 2
            wanted = data[tuple(slice(a, a + n) for a in low)]
            assert block[name][row, 0].tolist() == wanted.tolist()


def test_channels_are_volumes_of_their_own_and_missing_ones_unknown(tmp_path: Path) -> None:
    first, second = numbers(6, 6, 6), numbers(4, 6, 6, offset=900)
    paths = [write(tmp_path / "a", first), None, write(tmp_path / "b", second, translation=(1, 0, 0)), tmp_path / "a"]
    source = VolumeSource({"labels": VolumeArray(paths, (2, 2, 2), (1, 1, 1), "nearest")})
    assert source.fields["labels"].shape == (4, 2, 2, 2)
    assert source.bounding_box["z"] == (0.5, 4.5)
    items = np.arange(len(source.index))
    for (z, y, x), patch in zip(source.place_of(items).tolist(), source.take(items)["labels"], strict=True):
        around = np.pad(first.astype("f4"), 1, constant_values=np.nan)[z + 1 :, y:, x:][:2, :2, :2]
        np.testing.assert_array_equal(patch[0], around)
        np.testing.assert_array_equal(patch[3], around)
        assert np.isnan(patch[1]).all()
        around = np.pad(second.astype("f4"), 1, constant_values=np.nan)[z:, y:, x:][:2, :2, :2]
        np.testing.assert_array_equal(patch[2], around)
    # a and b have 8 and 4 chunks: the one that is asked for twice is decoded once.
    assert source.read_report()["chunks_decoded"] == 12


def test_one_channel_of_an_image_is_chosen(tmp_path: Path) -> None:
    data = numbers(3, 4, 4, 4)
    zarr.create_array(tmp_path / "a", data=data, chunks=(2, 4, 4, 4))
    images = [Multiscale.plain(tmp_path / "a", (1, 1, 1, 1), axes="czyx", at={"c": c}) for c in (2, 0)]
    source = VolumeSource({"raw": VolumeArray(images, (4, 4, 4), (1, 1, 1))}, pad=False)
    assert source.take(np.array([0]))["raw"][0].tolist() == data[[2, 0]].tolist()


def test_a_patch_larger_than_the_volume_is_padded_or_refused(tmp_path: Path) -> None:
    data = numbers(3, 3, 3)
    path = write(tmp_path / "a", data)
    source = VolumeSource({"raw": VolumeArray(path, (5, 9, 5), (1, 1, 1), pad_value=-1)})
    assert len(source.index) == 27
    patch = source.take(source.item_at([[1, 1, 1]]))["raw"][0, 0]
    np.testing.assert_array_equal(patch, np.pad(data.astype("f4"), ((1, 1), (3, 3), (1, 1)), constant_values=-1))
    message = r"A patch must fit .*, but 'raw' has 9 voxels of 1 along y, 9 in all, and .*a/s0 has 3 voxels of 1, 3 in"
    with pytest.raises(SourceError, match=message):
        VolumeSource({"raw": VolumeArray(path, (3, 9, 3), (1, 1, 1))}, pad=False)
    with pytest.raises(SourceError, match="has 5 voxels of 1 along x, 5 in all"):
        VolumeSource({"raw": cube(path, 3)}, pad=False, margin={"raw": (0, 0, 1)})


def test_volumes_must_overlap_and_have_the_same_units(tmp_path: Path) -> None:
    here = write(tmp_path / "a", numbers(4, 4, 4))
    there = write(tmp_path / "b", numbers(4, 4, 4), translation=(0, 4, 0))
    with pytest.raises(SourceError, match=r"along y, but .*a/s0 ends at 3.5 and .*b/s0 begins at 3.5"):
        VolumeSource({"raw": cube(here), "labels": cube(there)})
    apart = write(tmp_path / "c", numbers(4, 4, 4), translation=(0, 2.25, 0))
    with pytest.raises(SourceError, match=r"centre must lie between .* apart and none does"):
        VolumeSource({"raw": cube(here, 3), "labels": cube(apart, 2)}, pad=False)
    attributes = Path(there, ".zattrs")
    attributes.write_text(attributes.read_text().replace("nanometer", "micrometer"))
    with pytest.raises(SourceError, match=r"along axis 'z': nanometer in .*a/s0, micrometer in .*b/s0"):
        VolumeSource({"raw": cube(here), "labels": cube(there)})


# -- chunks ------------------------------------------------------------------------------------------------------------


def test_the_report_counts_every_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "a", numbers(8, 8, 8))
    source = VolumeSource({"raw": cube(path)}, pad=False)
    corner, middle = source.item_of([[0, 0, 0], [2, 2, 2]])
    source.take(np.array([corner]))  # 4³ voxels of 2 bytes, which are just one chunk
    report = {"bytes_delivered": 128, "bytes_decoded": 128, "chunks_decoded": 1, "cache_hits": 0, "cached_bytes": 128}
    assert source.read_report() == report | {"read_amplification": 1.0}
    source.take(np.array([middle]))  # a corner of each of the eight chunks, one of which is kept
    report = {"bytes_delivered": 256, "bytes_decoded": 1024, "chunks_decoded": 8, "cache_hits": 1, "cached_bytes": 1024}
    assert source.read_report() == report | {"read_amplification": 4.0}
    source.take(np.array([middle, corner, middle]))
    report |= {"bytes_delivered": 640, "cache_hits": 18, "read_amplification": 1.6}
    assert source.read_report() == report
    source.close()
    assert source.read_report() == report | {"cached_bytes": 0}
    source.take(np.array([corner]))
    assert source.read_report()["chunks_decoded"] == 9
    bare = VolumeSource({"raw": cube(path)}, pad=False, memory_bytes=0)
    for _ in range(2):
        bare.take(np.array([middle, corner]))
    report = {"bytes_delivered": 512, "bytes_decoded": 2304, "chunks_decoded": 18, "cache_hits": 0, "cached_bytes": 0}
    assert bare.read_report() == report | {"read_amplification": 4.5}
    small = VolumeSource({"raw": cube(path, 1)}, memory_bytes=0)
    small.read(Span(0, 64))  # all in one chunk, which is held for as long as one read needs it
    assert (small.read_report()["chunks_decoded"], small.read_report()["cache_hits"]) == (1, 63)


def test_neighbouring_items_decode_each_chunk_once(tmp_path: Path) -> None:
    data = numbers(8, 12, 9)
    path = write(tmp_path / "a", data)
    source = VolumeSource({"raw": cube(path, 1)}, memory_bytes=128)
    sizes = source.index.chunk_sizes(np.arange(source.index.n_chunks))
    assert sorted(sizes.tolist()) == [16] * 6 + [64] * 12
    for start in range(0, len(source.index), 10):  # batches do not care for chunks
        span = Span(start, min(start + 10, len(source.index)))
        wanted = data[tuple(source.place_of(range(span.start, span.stop)).T)]
        assert source.read(span)["raw"].ravel().tolist() == wanted.tolist()
        assert source.read_report()["cached_bytes"] <= 128
    assert source.read_report()["chunks_decoded"] == 18


@pytest.mark.parametrize("budget", [0, 127, 128, 300, 1 << 20])
def test_any_budget_gives_the_same_patches_and_is_never_exceeded(tmp_path: Path, budget: int) -> None:
    data = numbers(8, 8, 8)
    source = VolumeSource({"raw": cube(write(tmp_path / "a", data), 3)}, pad=False, memory_bytes=budget, threads=2)
    items = np.random.default_rng(1).integers(0, len(source.index), 50)
    for part in np.split(items, 5):
        found = source.take(part)["raw"]
        for row, (z, y, x) in enumerate(source.place_of(part).tolist()):
            assert found[row, 0].tolist() == data[z : z + 3, y : y + 3, x : x + 3].tolist()
        assert source.read_report()["cached_bytes"] <= budget


def test_a_volume_is_read_through_a_url(tmp_path: Path) -> None:
    data = numbers(6, 6, 6)
    path = write(tmp_path / "a", data)
    local, remote = VolumeSource({"raw": cube(path, 3)}), VolumeSource({"raw": cube(f"file://{path}", 3)})
    items = np.arange(len(local.index))
    assert remote.take(items)["raw"].tobytes() == local.take(items)["raw"].tobytes()
    again = pickle.loads(pickle.dumps(remote))
    assert again.take(items[5:7])["raw"].tobytes() == local.take(items[5:7])["raw"].tobytes()


def test_several_threads_decode_each_chunk_once(tmp_path: Path) -> None:
    data = numbers(16, 16, 16)
    source = VolumeSource({"raw": cube(write(tmp_path / "a", data), 5)}, pad=False, threads=4)
    wanted = {}
    start, failures = threading.Barrier(4), []

    def reader(seed: int) -> None:
        items = np.random.default_rng(seed).permutation(len(source.index))[:60]
        start.wait(120)
        try:
            wanted[seed] = (items, source.take(items)["raw"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for items, found in wanted.values():
        for row, (z, y, x) in enumerate(source.place_of(items).tolist()):
            assert found[row, 0].tolist() == data[z : z + 5, y : y + 5, x : x + 5].tolist()
    assert source.read_report()["chunks_decoded"] == 64


def test_a_fork_reads_for_itself(tmp_path: Path) -> None:
    data = numbers(8, 8, 8)
    source = VolumeSource({"raw": cube(write(tmp_path / "a", data))}, pad=False)
    wanted = source.take(np.arange(20))["raw"].tobytes()
    before = source.read_report()
    state = source._process_state()
    with state.lock, state.cache._lock:  # as if another thread was reading
        child = os.fork()
        if not child:
            try:
                same = source.take(np.arange(20))["raw"].tobytes() == wanted
                alone = list(source._states) == [os.getpid()]  # what the parent has kept is let go of
                os._exit(0 if same and alone and source.read_report() == before else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert source.read_report() == before


# -- damage ------------------------------------------------------------------------------------------------------------


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a", numbers(8, 8, 8), numbers(4, 4, 4))
    shutil.copytree(path, tmp_path / "b")
    before = hashes(tmp_path)
    folders = [tmp_path, *(folder for folder in tmp_path.rglob("*") if folder.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        arrays = {
            "raw": cube(path),
            "labels": VolumeArray([str(tmp_path / "b"), None], (2, 2, 2), (2, 2, 2), "nearest"),
        }
        source = VolumeSource(arrays)
        source.take(np.arange(len(source.index)))
        source.close()
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert hashes(tmp_path) == before


def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a", numbers(8, 8, 8))
    source = VolumeSource({"raw": cube(path)}, pad=False)
    good, bad = source.item_of([[0, 0, 0], [4, 0, 1]])
    Path(path, "s0", "1.0.0").write_bytes(b"nothing that was ever written")
    for _ in range(2):
        with pytest.raises(DamageError, match=rf"chunk \(1, 0, 0\) of {path}/s0: ") as caught:
            source.take(np.array([good, bad]))
        assert caught.value.item is None
    assert source.take(np.array([good]))["raw"].shape == (1, 1, 4, 4, 4)


def test_a_missing_chunk_holds_the_fill_value_or_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "a", numbers(4, 4, 8), fill_value=7)
    Path(path, "s0", "0.0.1").unlink()
    source = VolumeSource({"raw": cube(path)}, pad=False)
    assert source.take(source.item_of([[0, 0, 4]]))["raw"].tolist() == np.full((1, 1, 4, 4, 4), 7.0).tolist()
    assert source.read_report()["bytes_decoded"] == 0
    metadata = Path(path, "s0", ".zarray")
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"fill_value": None}))
    source = VolumeSource({"raw": cube(path)}, pad=False)
    with pytest.raises(DamageError, match=rf"chunk \(0, 0, 1\) of {path}/s0: it is missing"):
        source.take(source.item_of([[0, 0, 1]]))


def test_a_volume_that_changes_or_is_removed_is_a_read_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a", numbers(4, 4, 8))
    source = VolumeSource({"raw": cube(path)})
    metadata = Path(path, "s0", ".zarray")
    content = metadata.read_text()
    metadata.write_text(json.dumps(json.loads(content) | {"shape": [4, 4, 4]}))
    with pytest.raises(ReadError, match=f"{path}/s0 has changed since it was opened"):
        source.take(np.array([0]))
    metadata.write_text(content)
    source.take(np.array([0]))
    shutil.rmtree(path)
    with pytest.raises(ReadError, match=f"{path}/s0 is gone"):
        source.take(np.array([0]))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": []}, "a path, a Multiscale or None for each of one or more channels"),
        ({"paths": [3]}, "a path, a Multiscale or None for each of one or more channels"),
        ({"shape": (4,)}, "three numbers, one for each axis, or two for a slice"),
        ({"shape": (4, 4, 0)}, "shape must be an integer >= 1, got 0"),
        ({"shape": (4, 4)}, r"each axis of shape=\(4, 4\), got \(1, 1, 1\)"),
        ({"scale": (1, 1, -1)}, "a positive number for each axis"),
        ({"scale": (1, 1, math.nan)}, "a positive number for each axis"),
        ({"interpolation": "cubic"}, "must be one of 'linear', 'nearest', got 'cubic'"),
        ({"dtype": "S3"}, "an integer or floating-point dtype"),
        ({"pad_value": "x"}, "pad_value must be a number, got 'x'"),
        ({"dtype": "i4", "interpolation": "nearest"}, "pad_value must be an integer that int32 can hold, got nan"),
        (
            {"dtype": "u1", "interpolation": "nearest", "pad_value": 256},
            "pad_value must be an integer that uint8 can hold, got 256",
        ),
        ({"dtype": "i4", "pad_value": 0}, "dtype must be floating-point .* got int32"),
        (
            {"dtype": "i4", "pad_value": 0, "interpolation": "nearest", "paths": ["a", None]},
            "dtype must be floating-point .* got int32",
        ),
    ],
)
def test_wrong_arrays_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        VolumeArray(**{"paths": "a", "shape": (4, 4, 4), "scale": (1, 1, 1)} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrays": {}}, "mapping of names to one or more VolumeArrays"),
        ({"arrays": {"raw": "path"}}, r"arrays\['raw'\] must be a VolumeArray .*, got 'path'"),
        ({"arrays": {"raw": VolumeArray(None, (1, 1, 1), (1, 1, 1))}}, "all paths of raw are None"),
        ({"arrays": {"raw": VolumeArray("/nowhere/x", (1, 1, 1), (1, 1, 1))}}, "No volume at /nowhere/x"),
        ({"axis_order": "zy"}, "three different axes"),
        ({"axis_order": "zyy"}, "three different axes"),
        ({"axis_order": "tyx"}, r"a must have the spatial axes t, y, x .*'raw', t, y, x, but has z, y, x"),
        ({"pad": 0}, "pad must be True or False, got 0"),
        ({"memory_bytes": -1}, "memory_bytes must be an integer >= 0, got -1"),
        ({"threads": 0}, "threads must be an integer >= 1, got 0"),
        ({"margin": {"labels": (1, 1, 1)}}, r"margin must have names of arrays \(raw\), got \['labels'\]"),
        ({"margin": {"raw": (1, 1)}}, r"a number of voxels for each axis"),
        ({"margin": {"raw": (1, 1, -1)}}, r"margin\['raw'\] must be an integer >= 0, got -1"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given = {"arrays": {"raw": cube(write(tmp_path / "a", numbers(4, 4, 4)))}} | options
    with pytest.raises(OptionError, match=message):
        VolumeSource(**given)


def test_floats_are_not_cast_to_integers(tmp_path: Path) -> None:
    path = write(tmp_path / "a", numbers(4, 4, 4, dtype="f4"))
    with pytest.raises(
        SourceError, match=r"dtype of 'raw' must be one that float32 of .*a/s0 can be cast to, got int32"
    ):
        VolumeSource({"raw": cube(path, interpolation="nearest", pad_value=0, dtype="i4")})
    source = VolumeSource({"raw": cube(path)})
    with pytest.raises(OptionError, match=r"out\['raw'\] must be an array of float32 \(1, 1, 4, 4, 4\), got float64"):
        source.take(np.array([0]), {"raw": np.zeros((1, 1, 4, 4, 4))})
