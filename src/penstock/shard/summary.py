"""Facts about a dataset from its manifest, without reading items."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.core.errors import ReadError
from penstock.core.text import cause
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.staging import WRITING
from penstock.files.stores.errors import MissingObjectError
from penstock.shard.manifest import MANIFEST, Manifest, ShardEntry
from penstock.shard.places.open_dataset import find_sizes

__all__ = ["find_problem", "find_problems", "summarize"]


def summarize(manifest: Manifest) -> dict[str, Any]:
    """Return totals, fields, bytes and metadata of a dataset as plain JSON."""
    return {
        "total_samples": manifest.n_items,
        "total_shards": len(manifest.shards),
        "shard_size": manifest.shard_size,
        "compression": manifest.compression,
        **({} if manifest.layout == "samples" else {"layout": manifest.layout}),
        "modalities": manifest.modalities,
        "fields": {
            name: {
                "dtype": None if info.dtype is None else str(info.dtype),
                "shape": None if info.shape is None else list(info.shape),
                "stored_as": info.suffix.rpartition(".")[2],
            }
            for name, info in manifest.fields.items()
        },
        "total_bytes": sum(shard.stored_bytes for shard in manifest.shards),
        "metadata": dict(manifest.metadata),
        "fingerprint": manifest.fingerprint,
    }


def find_problems(manifest: Manifest, archives: RemoteFolder | None = None) -> list[str]:
    """Return the shards that are missing or have changed size, and parts of the same split that were not published.

    `penstock check --all` checks every byte.
    """
    if archives is None:
        found = [problem for shard in manifest.shards if (problem := find_problem(manifest, shard))]
        return [*found, *_find_unpublished(manifest)]
    try:
        sizes = find_sizes(archives, [shard.name for shard in manifest.shards])
    except ReadError:  # a server that lists nothing
        sizes = {}
        for shard in manifest.shards:
            with suppress(MissingObjectError):
                sizes[shard.name] = archives.describe(shard.name).n_bytes
    return [problem for shard in manifest.shards if (problem := _compare_size(shard, sizes.get(shard.name)))]


def _find_unpublished(manifest: Manifest) -> Iterator[str]:
    """Yield the other parts of a split whose conversion was killed after it had published this one."""
    split = manifest.metadata.get("conversion", {}).get("split") or {}
    for name in split.get("shares", ()):
        part = manifest.local_folder.parent / name
        if (part / WRITING).is_dir() and not (part / MANIFEST).exists():
            yield f"{name} of the same split was not published: convert again with --resume"


def find_problem(manifest: Manifest, shard: ShardEntry) -> str:
    """Return what is wrong with a shard at first sight: it is missing, or has another size; empty if nothing is."""
    try:
        size = (manifest.local_folder / shard.name).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return _compare_size(shard, None)
    except OSError as error:
        return f"{shard.name} cannot be found: {cause(error)}"
    return _compare_size(shard, size)


def _compare_size(shard: ShardEntry, size: int | None) -> str:
    if size is None:
        return f"{shard.name} is missing"
    return "" if size == shard.stored_bytes else f"{shard.name} has {size} bytes, but {shard.stored_bytes} were written"
