"""The same shards in a local folder, in a bucket and behind a web server, and what a cache folder holds of them."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from penstock_remote import Endpoint
from penstock_test_parts import to_plain

from penstock import Loader, Plan, TarSource, create_shards_from_arrays
from penstock.files.spans.folder import CacheFolder, _list_files

__all__ = ["Place", "RemoteSet", "digest_batch", "digests_of", "folder_bytes", "make_plan", "watch_folder", "write_set"]

Place = str
"""local, s3, s3 cached, http or http cached."""


@dataclass(frozen=True)
class RemoteSet:
    """Shards of items whose values are their positions, and where they are served."""

    folder: Path
    """The local copy, and the cache."""
    s3: Endpoint | None = None
    http: Endpoint | None = None
    cache_bytes: int | None = None
    caches: Path | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "set").glob("*.tar"))

    @property
    def cache(self) -> Path:
        return (self.caches or self.folder) / "cache"

    def copy(self, caches: Path) -> "RemoteSet":
        """Return this set with a cache folder elsewhere."""
        return replace(self, caches=caches)

    def open(self, place: Place, **options: Any) -> TarSource:
        """Return a source; caches of a set are one folder."""
        if place == "local":
            return TarSource(self.folder / "set", **options)
        endpoint = self.s3 if place.startswith("s3") else self.http
        assert endpoint is not None, f"the set is not served for {place}"
        if place.endswith("cached"):
            options = {"cache": self.cache, "cache_bytes": self.cache_bytes, **options}
        return TarSource(str(endpoint.url / "set"), **{"store": endpoint.options, **options})

    def with_cache(self, share: float) -> "RemoteSet":
        """Return this set with a cache of a share of its bytes."""
        return replace(self, cache_bytes=int(share * self.stored_bytes))

    def with_bytes(self, cache_bytes: int) -> "RemoteSet":
        """Return this set with a cache of so many bytes."""
        return replace(self, cache_bytes=cache_bytes)

    def downloaded(self) -> float:
        """Return the bytes of shards that left the servers since the last call, as a share of the set."""
        total = 0
        for endpoint in (self.s3, self.http):
            if endpoint is not None:
                names = [path.name for path in (self.folder / "set").glob("*.tar")]
                total += sum(endpoint.n_bytes(key=f"set/{name}") for name in names)
                endpoint.reset_counts()
        return total / self.stored_bytes


def write_set(
    folder: Path,
    n_items: int = 96,
    *,
    s3: Endpoint | None = None,
    http: Endpoint | None = None,
    item_bytes: int = 16384,
) -> RemoteSet:
    """Write shards of `n_items`, and serve copies of them; `x` of item i begins with i * len(x)."""
    length = item_bytes // 8
    arrays = {"x": np.arange(n_items * length).reshape(n_items, length)}
    create_shards_from_arrays(folder / "set", arrays, shard_size=max(1, n_items // 4), show_progress=False)
    for endpoint in (s3, http):
        if endpoint is not None:
            shutil.copytree(folder / "set", endpoint.folder / "set")
    return RemoteSet(folder, s3, http)


def digests_of(loader: Loader, epochs: int) -> list[Any]:
    """Return a digest of every batch from where the loader stands to the end of epoch `epochs` - 1."""
    found = []
    while loader.epoch < epochs:
        found += [digest_batch(batch) for batch in loader]
    return found


def digest_batch(batch: Any) -> dict[str, Any]:
    """Return a digest of all bits of a batch, and the first number of each item."""
    bits = {name: _hash(value) for name, value in batch.items()}
    return {**bits, "first": to_plain(batch["x"][:, 0])}


def _hash(value: Any) -> str:
    content = value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
    return hashlib.sha1(content).hexdigest()


def make_plan(source: TarSource, order: Any, **options: Any) -> Plan:
    return Plan(source.index, order, **{"batch_size": 7, "seed": 3, "tail": "short", **options})


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files of a cache, while no process adds or evicts any."""
    if not folder.is_dir():
        return 0
    with CacheFolder(folder, 1)._ledger():
        # By inode: a file that is renamed meanwhile is seen twice.
        found = {status.st_ino: status.st_size for _, status in _list_files(folder)}
    return sum(found.values())


@contextmanager
def watch_folder(folder: Path) -> Iterator[list[int]]:
    """Measure a folder all the time; the list has the most bytes that it held, and how often it was seen."""
    seen, is_over = [0, 0], Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            seen[0] = max(seen[0], folder_bytes(folder))
            seen[1] += 1

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()
        seen[0] = max(seen[0], folder_bytes(folder))
