"""The datasets in the bucket: items of 295 kB and of 20 kB in tar shards, and how a consumer takes them."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.delivery import LARGE
from bench.shard_data import Shapes
from bench.shards import store_penstock
from bench.sizes import sized

__all__ = ["BUCKET", "LARGE_ITEMS", "MIDDLE_ITEMS", "Items", "consume"]

BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class Items:
    """What the items of a dataset are like, and what a consumer takes of them."""

    name: str
    shapes: Shapes
    kept: str
    """The field that a consumer keeps."""

    n_items: int
    shard_items: int
    batch_size: int

    @property
    def payload_bytes(self) -> int:
        """The bytes of one item, without what its format adds."""
        return sum(4 * int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def shard_bytes(self) -> int:
        """About the bytes of a shard."""
        return self.shard_items * self.payload_bytes

    def store(self, root: Path) -> Path:
        """Write the shards if they are not there; return where they are."""
        shards = root / BUCKET / self.name
        if not (shards / "dataset_metadata.json").exists():
            store_penstock(shards, self.shapes, self.n_items, self.shard_items)
        return shards


LARGE_ITEMS = Items("large", {**LARGE}, "behavior", sized(2_000, 1_280), sized(100, 64), 32)
MIDDLE_ITEMS = Items(
    "middle", {"signal": (50, 100), "label": ()}, "label", sized(24_000, 4_096), sized(1_500, 512), 256
)


def consume(batches: Iterable[Any], kept: str) -> tuple[int, float]:
    """Take all batches, keep their labels and look at their metadata; return the items and the seconds."""
    began, labels, seen = time.perf_counter(), [], 0
    for batch in batches:
        labels.append(batch[kept])
        if "metadata" in batch:
            seen += sum(len(about) for about in batch["metadata"])
    return sum(map(len, labels)), time.perf_counter() - began
