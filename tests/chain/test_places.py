"""The same dataset at a path and at a URL: one order, one fingerprint, and states that resume at either."""

import io
import logging
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from penstock_remote import Endpoint

import penstock as ps
from penstock.shard.index_tars import index_archives

N_ITEMS = 60
X = np.arange(N_ITEMS * 6, dtype="f4").reshape(N_ITEMS, 6)


def write_shards(folder: Path, **options: Any) -> str:
    ps.create_shards_from_arrays(folder / "shards", {"x": X}, shard_size=13, show_progress=False, **options)
    return "shards"


def write_tars(folder: Path) -> str:
    for shard in range(3):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as archive:
            for item in range(20 * shard, 20 * shard + 20):
                content = io.BytesIO()
                np.save(content, X[item])
                member = tarfile.TarInfo(f"{item:03d}.npy")
                member.size = content.tell()
                archive.addfile(member, io.BytesIO(content.getvalue()))
    index_archives(folder / "part-{0..2}.tar")
    return "part-{0..2}.tar"


def write_zarr(folder: Path, **options: Any) -> str:
    zarr.create_array(folder / "x.zarr", data=X, **{"chunks": (7, 6), **options})
    return "x.zarr"


def write_hdf5(folder: Path, **options: Any) -> str:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("day/x", data=X, **options)
    return "x.h5/day/x"


def write_image(folder: Path) -> str:
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    level = {"path": "s0", "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1]}]}
    attributes = {"multiscales": [{"axes": axes, "datasets": [level], "version": "0.4"}]}
    zarr.create_group(folder / "image.zarr", zarr_format=2, attributes=attributes)
    data = 1 + np.arange(N_ITEMS, dtype="f4").reshape(3, 4, 5)
    zarr.create_array(folder / "image.zarr" / "s0", data=data, chunks=(2, 2, 2), zarr_format=2)
    return "image.zarr"


KINDS: dict[str, tuple[Callable[[Path], str], str]] = {
    "shards": (write_shards, "Shuffle()"),
    "shards in columns": (lambda folder: write_shards(folder, layout="columns"), "Shuffle()"),
    "compressed shards": (lambda folder: write_shards(folder, compression="gz"), "WindowShuffle(window=5)"),
    "tars of others": (write_tars, "Shuffle()"),
    "zarr": (write_zarr, "WindowShuffle(window=9)"),
    "zarr, rows that are plain": (lambda folder: write_zarr(folder, compressors=None), "Shuffle()"),
    "zarr, rows that are cut": (
        lambda folder: write_zarr(folder, compressors=None, chunks=(7, 3)),
        "WindowShuffle(window=9)",
    ),
    "zarr, a chunk for each row": (lambda folder: write_zarr(folder, chunks=(1, 6)), "Shuffle()"),
    "zarr, shards": (lambda folder: write_zarr(folder, shards=(14, 6)), "WindowShuffle(window=9)"),
    "zarr, read by zarr-python": (
        lambda folder: write_zarr(folder, filters=[zarr.codecs.TransposeCodec(order=(1, 0))]),
        "WindowShuffle(window=9)",
    ),
    "HDF5, contiguous": (write_hdf5, "Shuffle()"),
    "HDF5, chunks": (lambda folder: write_hdf5(folder, chunks=(7, 6), compression="gzip"), "WindowShuffle(window=9)"),
    "OME-NGFF": (write_image, "WindowShuffle(window=12)"),
}
VERBS: dict[str, Callable[[Any], Any]] = {
    "in storage order": lambda data: data,
    "shuffled": lambda data: data.shuffle(seed=3),
    "in windows": lambda data: data.shuffle(seed=3, window=1),
    "some items": lambda data: data.sample(0.7, seed=1).shuffle(seed=3),
}


def read(loader: ps.Loader) -> list[list[bytes]]:
    """Return the items in the batches that are left of an epoch."""
    return [[item.numpy().tobytes() for item in next(iter(batch.values()))] for batch in loader]


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_and_a_url_have_one_order_and_resume_each_others_states(
    kind: str, http_files: Endpoint, tmp_path: Path
) -> None:
    write, order = KINDS[kind]
    name, options = write(http_files.folder), {"shape": (1, 1, 1)} if kind == "OME-NGFF" else {}
    places = [
        ps.open(http_files.folder / name, **options),
        ps.open(f"{http_files.url}/{name}", **options),
        ps.open(f"{http_files.url}/{name}", cache=tmp_path / "cache", cache_bytes=1 << 20, **options),
    ]
    for verb, choose in VERBS.items():
        chosen = [choose(data) for data in places]
        if verb == "shuffled":
            assert [repr(data.order) for data in chosen] == [order] * 3
        assert [data.source.index.digest for data in chosen] == [chosen[0].source.index.digest] * 3
        loaders = [data.batch(8).loader() for data in chosen]
        whole, *others = [read(loader) for loader in loaders]
        assert others == [whole] * 2
        assert len({item for batch in whole for item in batch}) == sum(map(len, whole)) >= 0.7 * N_ITEMS
        for saved in loaders:
            saved.set_epoch(0)
            saved.skip(3)
            for other in loaders:
                if other is not saved:
                    other.load_state_dict(saved.state_dict())
                    assert read(other) == whole[3:]
            saved.load_state_dict(saved.state_dict())
        for loader in loaders:
            loader.close()


def test_a_full_shuffle_at_a_url_says_what_it_costs_and_what_costs_less(
    http_files: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    array = zarr.create_array(
        http_files.folder / "large.zarr", shape=(20_000, 12_800), chunks=(100, 12_800), dtype="f8", compressors=None
    )
    for chunk in range(200):  # 2 GB that take no room: files of a hole
        path = http_files.folder / "large.zarr" / array.metadata.encode_chunk_key((chunk, 0))
        path.parent.mkdir(parents=True)
        path.touch()
        os.truncate(path, 100 * 12_800 * 8)
    at_path, at_url = ps.open(http_files.folder / "large.zarr"), ps.open(f"{http_files.url}/large.zarr")
    small = ps.open(f"{http_files.url}/{write_shards(http_files.folder)}")  # comes in few requests in any order
    with caplog.at_level(logging.INFO, "penstock"):
        for data in (at_path.shuffle(), at_url, small.shuffle(), at_url.shuffle(window=5)):
            data.batch(8).loader().close()
        assert caplog.messages == []
        at_url.shuffle().batch(8).loader().close()
    (message,) = caplog.messages
    assert "about 18,626 requests from the URL in each epoch without a cache" in message
    assert "shuffle(seed, window=26) takes about 1,000, and holds 26 chunks of 100 items in memory" in message
