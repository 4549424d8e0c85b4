"""Volumes and labels at URLs: the same patches as on this machine, in torch's own forked workers too."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from penstock_cellmap_parts import CLASSES, INPUTS, TARGETS, cell, write_cell
from penstock_ome_parts import write_plate
from penstock_remote import Endpoint
from torch.utils.data import DataLoader

from penstock import OptionError, SourceError
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.image import CellMapImage
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.multi import CellMapMultiDataset, open_plate
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.plates import list_images
from penstock.source.volume.source import VolumeArray, VolumeSource

FILL: dict[str, Any] = {"missing_chunks": "fill"}  # empty chunks of labels are not stored
CHOSEN = [0, 777, 5, 1200, 6, 5]


def open_cell(server: Endpoint, **options: Any) -> CellMapDataset:
    if not (server.folder / "em").exists():
        write_cell(server.folder)
    settings: dict[str, Any] = {"classes": CLASSES, "input_arrays": INPUTS, "target_arrays": TARGETS} | options
    where = str(server.url)
    settings |= FILL
    return CellMapDataset(f"{where}/em", f"{where}/labels/[mito,er]", store=server.options, **settings)


def as_bytes(batch: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in batch.items()}


@pytest.fixture(params=["s3", "http", "cache"])
def open_remote(
    request: pytest.FixtureRequest, s3: Endpoint, http_files: Endpoint, tmp_path: Path
) -> Callable[..., CellMapDataset]:
    options = {"cache": tmp_path / "cache", "cache_bytes": 1 << 20} if request.param == "cache" else {}
    return lambda **more: open_cell(http_files if request.param == "http" else s3, **options, **more)


def test_patches_are_those_of_this_machine(tmp_path: Path, open_remote: Callable[..., CellMapDataset]) -> None:
    local, dataset = cell(tmp_path / "cell", **FILL), open_remote()
    assert (dataset.is_remote, local.is_remote, len(dataset)) == (True, False, len(local))
    assert dataset.volume.index.digest == local.volume.index.digest, "so that a state of one resumes on the other"
    wanted = [as_bytes(item) for item in local.__getitems__(CHOSEN)]
    assert [as_bytes(item) for item in dataset.__getitems__(CHOSEN)] == wanted
    assert [as_bytes(item) for item in pickle.loads(pickle.dumps(dataset)).__getitems__(CHOSEN)] == wanted
    assert dataset.class_counts == local.class_counts
    assert dataset.stored_bytes == pytest.approx(local.stored_bytes, rel=0.2), "estimated from some objects"


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_torch_read_what_was_read_before(tmp_path: Path, s3: Endpoint, method: str) -> None:
    local, dataset = cell(tmp_path / "cell", **FILL), open_cell(s3)
    dataset[3]  # the client of this process has threads, which do not survive a fork
    before = set(psutil.Process().children(recursive=True))
    loader = DataLoader(dataset, batch_size=2, sampler=CHOSEN, num_workers=2, multiprocessing_context=method)
    wanted = [as_bytes(batch) for batch in DataLoader(local, batch_size=2, sampler=CHOSEN)]
    for _ in range(2):
        assert [as_bytes(batch) for batch in loader] == wanted
    left = set(psutil.Process().children(recursive=True)) - before
    gone, _ = psutil.wait_procs([child for child in left if "resource_tracker" not in " ".join(child.cmdline())], 60)
    assert all(child in gone or "resource_tracker" in " ".join(child.cmdline()) for child in left)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_fetches_ahead_and_gives_the_same_batches(tmp_path: Path, s3: Endpoint, workers: int) -> None:
    local, dataset = cell(tmp_path / "cell", **FILL), open_cell(s3)
    pair = [
        CellMapDataLoader(each, batch_size=4, sampler=CHOSEN, num_workers=workers, rng=3)  # type: ignore[arg-type]
        for each in (local, dataset)
    ]
    found, wanted = ([as_bytes(batch) for batch in loader] for loader in pair)
    assert found == wanted


def test_chunks_of_all_crops_are_fetched_at_once(tmp_path: Path, s3: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    local = CellMapMultiDataset(datasets=[cell(tmp_path / "cell", **FILL) for _ in range(2)])
    multi, prepared = CellMapMultiDataset(datasets=[open_cell(s3) for _ in range(2)]), []
    monkeypatch.setattr(CellMapMultiDataset, "prepare", lambda _, items: prepared.append(items.tolist()))
    numbers = [5, len(multi) - 1]
    for found, wanted in zip(multi.__getitems__(numbers), local.__getitems__(numbers), strict=True):
        assert as_bytes(found) == as_bytes(wanted)
    assert prepared == [numbers]


def test_a_class_without_labels_at_a_url_is_unknown(s3: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    write_cell(s3.folder, classes=["mito"])
    with caplog.at_level(logging.WARNING):
        dataset = open_cell(s3)
    assert dataset.label_paths["er"] is None
    assert "names 'er', but" in caplog.text
    assert torch.isnan(dataset[0]["gt"][1]).all()


def test_images_sources_and_plates_at_a_url(tmp_path: Path, s3: Endpoint) -> None:
    write_cell(s3.folder)
    where, local = str(s3.url / "em"), s3.folder / "em"
    shape, scale = (4, 6, 6), (8.0, 8.0, 8.0)
    center = {"z": 48.0, "y": 64.0, "x": 80.0}
    images = [
        CellMapImage(path, "raw", scale, shape, **more) for path, more in ((where, {"store": s3.options}), (local, {}))
    ]
    assert images[0][center].numpy().tobytes() == images[1][center].numpy().tobytes()
    remote = VolumeSource(
        {"a": VolumeArray(where, shape, scale), "b": VolumeArray(local, shape, scale)}, store=s3.options
    )
    block = remote.take(np.array([3, 900]))
    assert block["a"].tobytes() == block["b"].tobytes()
    assert Multiscale.opened(where, store=s3.options).levels[1].shape == Multiscale.opened(local).levels[1].shape
    write_plate(s3.folder / "plate.zarr")
    plate = str(s3.url / "plate.zarr")
    found = list_images(plate, store=s3.options)
    assert [name.removeprefix(plate) for name in found] == [
        name.removeprefix(str(s3.folder / "plate.zarr")) for name in list_images(s3.folder / "plate.zarr")
    ]
    arrays = {"raw": {"shape": (8, 8), "scale": (1.0, 1.0)}}
    crops = [
        open_plate(path, None, arrays, at={"c": 0}, **more)
        for path, more in ((plate, {"store": s3.options}), (s3.folder / "plate.zarr", {}))
    ]
    numbers = [0, len(crops[0]) - 1, len(crops[0]) // 2]
    first, second = ([as_bytes(item) for item in crop.__getitems__(numbers)] for crop in crops)
    assert first == second


def test_options_that_do_not_fit_are_named(tmp_path: Path, s3: Endpoint) -> None:
    with pytest.raises(OptionError, match="cache_bytes is for URLs, got the local path"):
        cell(tmp_path, cache_bytes=5)
    with pytest.raises(OptionError, match="cache is for URLs, got the local path"):
        cell(tmp_path, cache=tmp_path / "cache")
    with pytest.raises(OptionError, match="The memory of decoded chunks is memory_bytes"):
        VolumeSource({"a": VolumeArray(tmp_path / "em", (1, 1, 1), (8, 8, 8))}, cache_bytes=5)
    with pytest.raises(SourceError, match=r"s3://.*/em has no OME-NGFF metadata"):
        Multiscale.opened(str(s3.url / "em"), store=s3.options)
    with pytest.raises(TypeError, match="Options of a URL must be among store, cache, cache_bytes, got region"):
        Multiscale.opened(str(s3.url / "em"), region="x")  # type: ignore[call-arg]
