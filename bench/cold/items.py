"""Items in tar shards, read from the disk: Penstock beside what the disk gives, and beside others.

Large items have three fields and 295 kB, small ones 16×16 float32 with a label (1 kB; 4 kB in the tar). Consumers keep
the labels; those of large items, read by Penstock, look at the metadata, too. A first epoch verifies every checksum;
later ones are measured in the same process. Each peer has a copy of the data.
"""

import multiprocessing as mp
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.cold.limits import HINTS_AHEAD, random_reading, sequential_reading
from bench.cold.loaders import RUN_ITEMS, Way, consume
from bench.cold.pages import drop, files_of
from bench.delivery import KEPT, LARGE, SMALL, open_torch
from bench.measure import Contender, alone, measured, report
from bench.peers import has_peer
from bench.shard_data import Shapes
from bench.shard_peers import (
    open_litdata,
    open_mosaic,
    open_spdl,
    open_webdataset,
    store_arrays,
    store_litdata,
    store_mds,
)
from bench.shards import store_penstock
from bench.sizes import sized

__all__ = [
    "LARGE_ITEMS",
    "PEERS",
    "SMALL_ITEMS",
    "Items",
    "Peer",
    "limit_contenders",
    "run_large",
    "run_peers",
    "run_small",
]


@dataclass(frozen=True, slots=True)
class Items:
    """What the items of a dataset are like, and what a consumer takes of them."""

    name: str
    shapes: Shapes
    n_items: int
    shard_items: int
    batch_size: int
    fields: tuple[str, ...] | None
    """None: all, and the metadata."""

    @property
    def payload_bytes(self) -> int:
        """The bytes of one item, without what its format adds."""
        return sum(4 * int(np.prod(shape)) for shape in self.shapes.values())

    def source(self, shards: Path) -> ps.TarSource:
        """Open the shards, in runs of 64 items."""
        return ps.TarSource(shards, fields=self.fields, chunk_items=RUN_ITEMS)

    def store(self, folder: Path) -> Path:
        """Write the shards if they are not there; return where they are."""
        shards = folder / f"cold-{self.name}"
        if not (shards / "dataset_metadata.json").exists():
            store_penstock(shards, self.shapes, self.n_items, self.shard_items)
        return shards


LARGE_ITEMS = Items("large", {**LARGE}, sized(3_000, 1_280), sized(300, 160), 32, None)
SMALL_ITEMS = Items("small", {**SMALL}, sized(100_000, 10_000), sized(10_000, 2_000), 256, tuple(SMALL))


# -- contenders --------------------------------------------------------------------------------------------------------


def penstock(shards: Path, items: Items, way: Way) -> float:
    """Iterate a loader."""
    mp.set_start_method("fork", force=True)  # of workers, as on Linux by default, though this process was spawned
    files = files_of(shards)
    with way.loader(items.source(shards), items.batch_size) as loader:
        for _ in range(way.epoch):
            consume(loader, KEPT[items.name], items.payload_bytes)
        drop(files)
        return consume(loader, KEPT[items.name], items.payload_bytes)


def peer(stored: Path, items: Items, opener: Callable[[Path, int], Any], workers: int) -> float:
    """Iterate what a peer opens."""
    mp.set_start_method("fork", force=True)
    batches = opener(stored, workers)
    drop(files_of(stored))
    return consume(batches, KEPT[items.name], items.payload_bytes)


def limit_contenders(shards: Path, items: Items) -> list[Contender]:
    """Return the two that all ratios refer to."""
    payload = items.n_items * items.payload_bytes
    return [
        Contender("sequential reading", sequential_reading, (shards, payload, "*.tar")),
        Contender(
            f"random reading, hints {HINTS_AHEAD} ahead", random_reading, (shards, payload, items.n_items, HINTS_AHEAD)
        ),
    ]


def _penstocks(shards: Path, items: Items, *ways: Way) -> list[Contender]:
    return [Contender(str(way), penstock, (shards, items, way)) for way in ways]


# -- parts -------------------------------------------------------------------------------------------------------------


def run_large(folder: Path, out: Path, repeats: int) -> None:
    """Measure 295 kB items."""
    shards = LARGE_ITEMS.store(folder)
    contenders = [
        *limit_contenders(shards, LARGE_ITEMS),
        Contender(
            "random reading, no hints",
            random_reading,
            (shards, LARGE_ITEMS.n_items * LARGE_ITEMS.payload_bytes, LARGE_ITEMS.n_items, 0),
        ),
        *_penstocks(
            shards,
            LARGE_ITEMS,
            Way("Shuffle", "inline"),
            Way("Shuffle", "inline", epoch=1),
            Way("Shuffle", "inline", ahead=False),
            Way("Shuffle", "2 threads"),
            Way("Shuffle", "2 threads", epoch=1),
            Way("Shuffle", "2 processes"),
            Way("windows", "inline"),
            Way("windows", "2 threads"),
            Way("held windows", "2 threads"),
        ),
    ]
    _measure("cold large", contenders, out, repeats)


def run_small(folder: Path, out: Path, repeats: int) -> None:
    """Measure 1 kB items."""
    shards = SMALL_ITEMS.store(folder)
    contenders = [
        *limit_contenders(shards, SMALL_ITEMS),
        *_penstocks(
            shards,
            SMALL_ITEMS,
            Way("windows", "inline"),
            Way("windows", "inline", epoch=1),
            Way("windows", "2 threads"),
            Way("windows", "2 threads", epoch=1),
            Way("Shuffle", "inline"),
            Way("Shuffle", "2 threads"),
            Way("Shuffle", "inline", ahead=False),
            Way("Shuffle", "2 threads", ahead=False),
        ),
    ]
    _measure("cold small", contenders, out, repeats)


def _measure(name: str, contenders: list[Contender], out: Path, repeats: int) -> None:
    report(out, name, measured(contenders, repeats, limits=2))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another package: how it stores the samples (None: it reads our shards), and how it reads them."""

    module: str
    title: str
    store: Callable[[Path, Shapes, int], None] | None
    opener: Callable[[Path, int], Any]


PEERS = (
    Peer("webdataset", "webdataset", None, open_webdataset),
    Peer("litdata", "litdata", store_litdata, open_litdata),
    Peer("streaming", "MosaicML streaming", store_mds, open_mosaic),
    Peer("spdl", "SPDL, memory map", store_arrays, open_spdl),
    Peer("torch", "torch DataLoader, memory map", store_arrays, open_torch),
)


def run_peers(folder: Path, out: Path, repeats: int) -> None:
    """Measure all peers with 295 kB items, without workers and with two, beside the limits and Penstock."""
    items, shards = LARGE_ITEMS, LARGE_ITEMS.store(folder)
    contenders = [
        *limit_contenders(shards, items),
        *_penstocks(shards, items, Way("Shuffle", "inline"), Way("Shuffle", "2 threads")),
    ]
    for which in PEERS:
        stored = shards
        if which.store is not None and has_peer(which.module):
            stored = folder / f"cold-{which.store.__name__.removeprefix('store_')}"
            if not stored.exists():
                alone(which.store, stored, items.shapes, items.n_items, peer=which.module)
        contenders += [
            Contender(f"{which.title}, {workers} workers", peer, (stored, items, which.opener, workers), which.module)
            for workers in (0, 2)
        ]
    _measure("cold peers", contenders, out, repeats)
