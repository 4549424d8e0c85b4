"""Windows of a zarr array in the bucket, beside downloading the same chunks, and beside zarr-python and tensorstore.

The array is (64 000, 2 000) float32 in chunks of 2 000 rows (16 MB), raw and blosc-lz4, or of 125 rows (1 MB). A window
has 8 000 rows; every row is read once, and windows come in a random order. Peers read one window after the
other, as in their documentation, and tensorstore with the next window asked for while this one is consumed, as well.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.chunks import CHUNK, COLUMNS, voltages
from bench.measure import Contender, measured, report
from bench.remote.endpoint import Endpoint, serve
from bench.remote.items import BUCKET
from bench.remote.limits import IN_FLIGHT, download, open_bucket
from bench.sizes import sized

__all__ = ["run"]

ROWS, WINDOW, BATCH = sized(64_000, 16_000), 8_000, 256
_PAYLOAD = ROWS * COLUMNS * 4
CASES = {
    "raw, chunks of 16 MB": ("raw", CHUNK),
    "lz4, chunks of 16 MB": ("lz4", CHUNK),
    "raw, chunks of 1 MB": ("raw", 125),
}


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for number, (name, (codec, chunk)) in enumerate(CASES.items()):
        path = folder / BUCKET / f"windows-{number}.zarr"
        _write(path, codec, chunk)
        with serve(folder) as endpoint:
            contenders = [
                Contender(f"obstore, {IN_FLIGHT} requests in flight", limit, (endpoint, path)),
                Contender("RandomChunkLoader", windows, (endpoint, path.name)),
                Contender("shuffled rows, 2 threads", rows, (endpoint, path.name, chunk)),
                Contender("zarr-python with obstore", zarr_python, (endpoint, path.name)),
            ]
            contenders += [
                Contender("tensorstore", tensorstore, (endpoint, path.name, 0), "tensorstore"),
                Contender("tensorstore, a window ahead", tensorstore, (endpoint, path.name, 1), "tensorstore"),
            ]
            results = measured(contenders, repeats)
        report(out, f"remote zarr {name}", results)
        shutil.rmtree(path)


def limit(endpoint: Endpoint, path: Path) -> float:
    """Download all chunks; return MB per second of the array."""
    endpoint.limit()
    return _PAYLOAD / 1e6 / download(endpoint, path, "*")


def windows(endpoint: Endpoint, name: str) -> float:
    """Take all windows of an epoch."""
    with ps.recipes.streams.RandomChunkLoader(
        _open(endpoint, name), None, WINDOW, "cpu", seed=1, coverage="partition", align=WINDOW
    ) as loader:
        count = loader.chunks_per_pass
        endpoint.limit()
        began = time.perf_counter()
        loader.start_epoch()
        return _rate((loader.get_next_chunk() for _ in range(count)), began)


def rows(endpoint: Endpoint, name: str, chunk: int) -> float:
    """Take all batches of an epoch, shuffled in windows of as many rows."""
    source = _open(endpoint, name)
    order = ps.WindowShuffle(WINDOW // chunk, held=False)
    plan = ps.Plan(source.index, order, batch_size=BATCH, seed=1, tail="drop")
    with ps.Loader(source, plan, num_workers=2, options=ps.RunOptions(executor="threads")) as loader:
        endpoint.limit()
        began = time.perf_counter()
        return _rate((batch["data"] for batch in loader), began)


def zarr_python(endpoint: Endpoint, name: str) -> float:
    """Read windows with zarr-python."""
    import zarr
    from zarr.storage import ObjectStore

    array: Any = zarr.open_array(ObjectStore(open_bucket(endpoint, name), read_only=True), mode="r")
    endpoint.limit()
    began = time.perf_counter()
    return _rate((array[start : start + WINDOW] for start in _starts()), began)


def tensorstore(endpoint: Endpoint, name: str, ahead: int) -> float:
    """Read windows with tensorstore, so many of them ahead."""
    import tensorstore as ts

    os.environ |= endpoint.environment
    kvstore = {
        "driver": "s3",
        "bucket": BUCKET,
        "path": f"{name}/",
        "endpoint": endpoint.http,
        "aws_region": "us-east-1",
    }
    array = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()

    def read() -> Iterator[Any]:
        futures: list[Any] = []
        for start in _starts():
            futures.append(array[start : start + WINDOW].read())
            if len(futures) > ahead:
                yield futures.pop(0).result()
        for future in futures:
            yield future.result()

    endpoint.limit()
    began = time.perf_counter()
    return _rate(read(), began)


def _open(endpoint: Endpoint, name: str) -> ps.ZarrSource:
    os.environ |= endpoint.environment
    return ps.ZarrSource(f"s3://{BUCKET}/{name}")


def _starts() -> list[int]:
    return (np.random.default_rng(1).permutation(ROWS // WINDOW) * WINDOW).tolist()


def _rate(arrays: Iterable[Any], began: float) -> float:
    """Keep the first column of all arrays; return MB per second."""
    kept = [np.array((array if hasattr(array, "shape") else array[0])[:, 0]) for array in arrays]
    return sum(map(len, kept)) * COLUMNS * 4 / 1e6 / (time.perf_counter() - began)


def _write(path: Path, codec: str, chunk: int) -> None:
    import numcodecs
    import zarr

    shutil.rmtree(path, ignore_errors=True)
    stored = zarr.create_array(
        path,
        shape=(ROWS, COLUMNS),
        chunks=(chunk, COLUMNS),
        dtype="f4",
        zarr_format=2,
        compressors={"raw": None, "lz4": numcodecs.Blosc("lz4", 5, 1)}[codec],
    )
    rng = np.random.default_rng(0)
    for start in range(0, ROWS, CHUNK):
        stored[start : start + CHUNK] = voltages(start, rng)
