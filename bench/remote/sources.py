"""How Penstock opens what is in the bucket."""

import os
from pathlib import Path

import penstock as ps
from bench.cold.loaders import RUN_ITEMS
from bench.remote.endpoint import Endpoint
from bench.remote.items import BUCKET, Items

__all__ = ["open_source"]


def open_source(endpoint: Endpoint, items: Items, cache: Path | None = None, cache_bytes: int = 0) -> ps.TarSource:
    """Open the shards, in runs of 64 items."""
    os.environ |= endpoint.environment
    kept = {"cache": cache, "cache_bytes": cache_bytes} if cache else {}
    return ps.TarSource(f"s3://{BUCKET}/{items.name}", chunk_items=RUN_ITEMS, **kept)
