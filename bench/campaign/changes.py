"""Files that are truncated, replaced, removed or rewritten while others read them: right items, or a typed error.

One process changes a file again and again, and puts it right again; four threads, or the two worker processes of a
Loader, read meanwhile. Never a wrong item, never a dead process: a read of a map of a truncated file is a SIGBUS.
"""

import multiprocessing as mp
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from penstock_test_parts import run_at_once
from zarr.codecs import Crc32cCodec

from bench.campaign.trials import Kind, Run, Trials
from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle, Source, TarSource
from penstock.core.errors import PenstockError
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.source.stored.source import ZarrSource

__all__ = ["CHANGES"]

_ROWS = np.arange(1, 241, dtype=np.float32).reshape(60, 4)
_READS, _THREADS = 120, 4  # of one thread, of one trial
_TRUNCATIONS = ("empty", "cut", "replaced by less")
_REWRITES = ("rewritten", "rewritten in steps", "replaced by others", "zeros")


@dataclass(frozen=True)
class Stored:
    """Rows in a file.

    Parameters
    ----------
    write
        `write(folder)` stores the rows, and returns the file to change and a function that opens the source.
    changes
        What may happen to it. Files without checksums are never given other content of the same size, which nobody
        could notice.
    is_put_right
        Whether changes are undone, again and again; without checksums or dates, only one that stays can be noticed.
    """

    write: Callable[[Path], tuple[Path, Callable[[], Source]]]
    changes: tuple[str, ...]
    is_put_right: bool = True


def _shards(compression: Any, suffix: str = "") -> Callable[[Path], tuple[Path, Callable[[], Source]]]:
    def write(folder: Path) -> tuple[Path, Callable[[], Source]]:
        with WebDatasetWriter(folder / "set", shard_size=20, compression=compression) as writer:
            for number, row in enumerate(_ROWS):  # of different sizes, so that the side index is needed
                writer.write_sample({"x": row, "y": np.full(200 * (number % 3), number, np.float32)})
        return folder / "set" / f"shard_000001.tar{suffix}", lambda: TarSource(folder / "set", fields=["x"])

    return write


def _chunks(compressors: Any) -> Callable[[Path], tuple[Path, Callable[[], Source]]]:
    def write(folder: Path) -> tuple[Path, Callable[[], Source]]:
        options = {"chunks": (20, 4), "compressors": compressors, "zarr_format": 3}
        zarr.create_array(folder / "x", shape=_ROWS.shape, dtype=_ROWS.dtype, **options)[...] = _ROWS
        return folder / "x" / "c" / "1" / "0", lambda: ZarrSource(folder, {"x": "x"}, threads=2)

    return write


def _map(folder: Path) -> tuple[Path, Callable[[], Source]]:
    np.save(folder / "x.npy", _ROWS)
    return folder / "x.npy", lambda: ArraySource({"x": np.load(folder / "x.npy", mmap_mode="r")})


def _npy(folder: Path) -> tuple[Path, Callable[[], Source]]:
    np.save(folder / "x.npy", _ROWS)
    return folder / "x.npy", lambda: ZarrSource(folder, {"x": "x.npy"}, threads=2)


def _change(path: Path, kind: str, whole: bytes, rng: random.Random) -> None:
    """Change a file."""
    aside = path.with_name(f"{path.name}.aside")
    wrong = bytes(byte ^ 0x55 for byte in whole)
    match kind:
        case "empty" | "cut" | "zeros":
            os.truncate(path, rng.randrange(len(whole)) if kind == "cut" else 0)
            if kind == "zeros":
                os.truncate(path, len(whole))
        case "removed":
            path.unlink()
        case "replaced by less" | "replaced by others":
            aside.write_bytes(whole[: rng.randrange(len(whole))] if kind == "replaced by less" else wrong)
            aside.replace(path)
        case "rewritten":
            with path.open("r+b") as file:
                file.write(wrong)
        case "rewritten in steps":
            with path.open("r+b", buffering=0) as file:
                for start in range(0, len(wrong), 500):
                    file.write(wrong[start : start + 500])


def _put_right(path: Path, whole: bytes, rng: random.Random) -> None:
    aside = path.with_name(f"{path.name}.aside")
    aside.write_bytes(whole)
    if rng.random() < 0.5:
        aside.replace(path)
    else:
        path.write_bytes(whole)


@contextmanager
def _run_vandal(path: Path, stored: Stored, seed: float) -> Iterator[None]:
    whole, context = path.read_bytes(), mp.get_context("fork")
    ready = context.Event()

    def vandalise() -> None:
        rng = random.Random(seed)
        ready.set()
        while True:
            time.sleep(rng.choice((0, 0.001, 0.005)))
            _change(path, rng.choice(stored.changes), whole, rng)
            if not stored.is_put_right:
                return
            time.sleep(rng.choice((0, 0.0005, 0.003)))
            _put_right(path, whole, rng)

    process = context.Process(target=vandalise, daemon=True)
    process.start()
    try:
        assert ready.wait(120)
        yield
    finally:
        process.kill()
        process.join()
        path.write_bytes(whole)


def _check(found: NDArray[Any], items: NDArray[np.int64]) -> None:
    assert np.asarray(found).tobytes() == _ROWS[items].tobytes(), f"wrong values for items {items.tolist()}"


def _read_in_threads(stored: Stored) -> Run:
    def run(rng: random.Random, folder: Path, number: int) -> int:
        path, open_source = stored.write(folder)
        source, counts = open_source(), [0] * _THREADS
        seeds = [rng.getrandbits(32) for _ in counts]

        def read(thread: int) -> None:
            draw = np.random.default_rng(seeds[thread])
            while counts[thread] < _READS:
                items = draw.integers(0, len(_ROWS), 5)
                with suppress(PenstockError):
                    _check(source.take(items)["x"], items)
                counts[thread] += 1

        with _run_vandal(path, stored, rng.random()):
            run_at_once(_THREADS, read)
        source.close()
        _check_all(open_source)
        return sum(counts)

    return run


def _read_in_processes(stored: Stored) -> Run:
    def run(rng: random.Random, folder: Path, number: int) -> int:
        path, open_source = stored.write(folder)
        source, batches = open_source(), 0
        plan = Plan(source.index, Shuffle(), batch_size=5, seed=number)
        options = RunOptions(executor="processes", start_method="fork", persistent=True)
        with _run_vandal(path, stored, rng.random()):
            with Loader(source, plan, num_workers=2, options=options) as loader:
                while loader.epoch < 10:
                    position = loader.state_dict()
                    try:
                        for batch in loader:
                            _check(batch["x"], plan.epoch(position["epoch"]).draw(position["batch"]).items)
                            position, batches = loader.state_dict(), batches + 1
                    except PenstockError:  # try the batch after it
                        loader.load_state_dict(position)
                        loader.skip(1)
                        batches += 1
        _check_all(open_source)
        return batches

    return run


def _check_all(open_source: Callable[[], Source]) -> None:
    """Check that all is right once the file is."""
    source, items = open_source(), np.arange(len(_ROWS))
    _check(source.take(items)["x"], items)
    source.close()


_KINDS = {
    "shard": ("shards", (11, 12, 17, 18, 33), Stored(_shards("none"), ("removed", *_TRUNCATIONS, *_REWRITES))),
    "shard-gz": ("shards of gz", (11, 17, 18), Stored(_shards("gz"), ("removed", *_TRUNCATIONS, *_REWRITES))),
    "index": ("side indexes", (18, 33), Stored(_shards("none", ".index"), ("removed", *_TRUNCATIONS, *_REWRITES))),
    "zarr-checked": (
        "zarr chunks with checksums",
        (20, 33),
        Stored(_chunks((Crc32cCodec(),)), ("removed", *_TRUNCATIONS, *_REWRITES)),
    ),
    "zarr-plain": ("zarr chunks", (20,), Stored(_chunks(()), ("removed", *_TRUNCATIONS))),
    "npy-map": ("memory maps", (11,), Stored(_map, ("removed", *_TRUNCATIONS), is_put_right=False)),
    "npy": ("npy files", (11,), Stored(_npy, ("removed", *_TRUNCATIONS))),
}
_READERS = {"threads": _read_in_threads, "processes": _read_in_processes}
CHANGES = Trials(
    "changes",
    [
        Kind(f"{name}-{how}", f"reads of {what} that change, {how}", cases, read(stored))
        for name, (what, cases, stored) in _KINDS.items()
        for how, read in _READERS.items()
    ],
)
