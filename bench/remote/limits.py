"""What the endpoint gives: obstore downloads the same objects with 16 requests in flight, and drops what it gets."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.remote.endpoint import Endpoint
from bench.remote.items import BUCKET

__all__ = ["IN_FLIGHT", "download", "open_bucket"]

IN_FLIGHT, _PIECE = 16, 4 << 20


def open_bucket(endpoint: Endpoint, prefix: str | None = None) -> Any:
    """Return a store of obstore: the bucket, or a folder of it."""
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=endpoint.http,
        region="us-east-1",
        access_key_id="penstockkey",
        secret_access_key="penstocksecret",
        client_options={"allow_http": True},
    )


def download(endpoint: Endpoint, folder: Path, pattern: str = "*.tar") -> float:
    """Download the objects under a folder of the bucket, in ranges of at most 4 MiB; return the seconds."""
    import obstore

    root = next(parent for parent in folder.parents if parent.name == BUCKET)
    sizes = {str(path.relative_to(root)): path.stat().st_size for path in sorted(folder.rglob(pattern))}
    ranges = [(key, at, min(size, at + _PIECE)) for key, size in sizes.items() for at in range(0, size, _PIECE)]
    bucket = open_bucket(endpoint)

    def fetch(job: tuple[str, int, int]) -> None:
        obstore.get_range(bucket, job[0], start=job[1], end=job[2])

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        began = time.perf_counter()
        for _ in pool.map(fetch, ranges):
            pass
        return time.perf_counter() - began
