"""How others store the samples in a bucket, and stream them with a cache of bounded size.

Each as its documentation says, with what it has for shuffling and for its cache: webdataset over HTTP, with shards in
`cache_dir`; litdata with `max_cache_size`; MosaicML streaming with `cache_limit`. A worker process of torch does the
downloading, so that two are used, except for MosaicML streaming, which most often hangs with two; it has a thread that
downloads ahead in either case.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from bench.remote.endpoint import Endpoint
from bench.remote.items import BUCKET, Items
from bench.shard_data import samples
from bench.shard_peers import streaming_package

__all__ = ["PEERS", "Peer"]

WORKERS = 2
_BUFFER = 1_000


@dataclass(frozen=True, slots=True)
class Peer:
    """Another package: how it stores the samples (None: it reads our shards), and how it streams them."""

    module: str
    title: str
    store: Callable[[Path, Items], None] | None
    opener: Callable[[Endpoint, Path, Items, Path, int | None], Iterable[Any]]
    """Of endpoint, folder in the bucket, items, folder for its cache, and the most bytes in it (None: no limit)."""


def open_webdataset(
    endpoint: Endpoint, stored: Path, items: Items, cache: Path, cache_bytes: int | None
) -> Iterable[Any]:
    """Return the batches of the webdataset library, which reads the shards over HTTP."""
    import webdataset as wds

    cache.mkdir(parents=True, exist_ok=True)
    urls = [f"{endpoint.http}/{BUCKET}/{stored.name}/{path.name}" for path in sorted(stored.glob("*.tar"))]
    kept = {"cache_dir": str(cache), "cache_size": cache_bytes} if cache_bytes else {}
    data = (
        wds.WebDataset(urls, shardshuffle=len(urls), seed=1, **kept)
        .shuffle(_BUFFER)
        .decode()
        .map(_without_suffix)
        .batched(items.batch_size, collation_fn=torch.utils.data.default_collate, partial=False)
    )
    return DataLoader(data, batch_size=None, num_workers=WORKERS)


def _without_suffix(sample: dict[str, Any]) -> dict[str, Any]:
    return {name.removesuffix(".npy"): value for name, value in sample.items() if name.endswith(".npy")}


def store_litdata(folder: Path, items: Items) -> None:
    """Store samples with litdata."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes=items.shard_bytes)
    for number, sample in enumerate(samples(items.shapes, items.n_items)):
        writer[number] = {name: torch.from_numpy(np.array(array)) for name, array in sample.items()}
    writer.done()
    writer.merge(1)


def open_litdata(endpoint: Endpoint, stored: Path, items: Items, cache: Path, cache_bytes: int | None) -> Iterable[Any]:
    """Return a loader of litdata."""
    import litdata as ld
    from litdata.streaming import downloader

    options: Any = downloader._OBSTORE_CLIENT_OPTIONS
    options["allow_http"] = True  # an endpoint without TLS, which it has no option for
    data = ld.StreamingDataset(
        f"s3://{BUCKET}/{stored.name}",
        cache_dir=str(cache),
        max_cache_size=cache_bytes,
        shuffle=True,
        drop_last=True,
        seed=1,
        storage_options={"endpoint_url": endpoint.http},
    )
    return ld.StreamingDataLoader(data, batch_size=items.batch_size, num_workers=WORKERS)  # type: ignore[no-any-return]


def store_mds(folder: Path, items: Items) -> None:
    """Store samples with MosaicML streaming."""
    columns = {
        name: f"ndarray:float32:{','.join(map(str, shape))}" if shape else "float32"
        for name, shape in items.shapes.items()
    }
    with streaming_package().MDSWriter(out=str(folder), columns=columns, size_limit=items.shard_bytes) as sink:
        for sample in samples(items.shapes, items.n_items):
            sink.write({name: array if array.ndim else np.float32(array) for name, array in sample.items()})


def open_mosaic(endpoint: Endpoint, stored: Path, items: Items, cache: Path, cache_bytes: int | None) -> Iterable[Any]:
    """Return torch's DataLoader over a dataset of MosaicML streaming."""
    os.environ |= endpoint.environment
    data = streaming_package().StreamingDataset(
        remote=f"s3://{BUCKET}/{stored.name}",
        local=str(cache),
        cache_limit=cache_bytes,
        shuffle=True,
        shuffle_seed=1,
        # Its default is larger than the dataset. With 1,000 it needs as many shards at a time as its cache may have,
        # and downloads them again and again: 7.5 times the dataset in the first epoch.
        shuffle_block_size=_BUFFER // 2,
        batch_size=items.batch_size,
    )
    return DataLoader(data, batch_size=items.batch_size, drop_last=True)


PEERS = (
    Peer("webdataset", "webdataset", None, open_webdataset),
    Peer("litdata", "litdata", store_litdata, open_litdata),
    Peer("streaming", "MosaicML streaming", store_mds, open_mosaic),
)
