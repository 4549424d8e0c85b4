"""Facts about a dataset from its manifest, without reading items."""

from typing import Any

from penstock.core.text import cause
from penstock.shard.manifest import Manifest, ShardEntry

__all__ = ["find_problem", "find_problems", "summarize"]


def summarize(manifest: Manifest) -> dict[str, Any]:
    """Return totals, fields, bytes and metadata of a dataset as plain JSON."""
    return {
        "total_samples": manifest.n_items,
        "total_shards": len(manifest.shards),
        "shard_size": manifest.shard_size,
        "compression": manifest.compression,
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


def find_problems(manifest: Manifest) -> list[str]:
    """Return the shards that are missing or have changed size. `penstock verify` checks every byte."""
    return [problem for shard in manifest.shards if (problem := find_problem(manifest, shard))]


def find_problem(manifest: Manifest, shard: ShardEntry) -> str:
    """Return what is wrong with a shard at first sight: it is missing, or has another size; empty if nothing is."""
    try:
        size = (manifest.folder / shard.name).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{shard.name} is missing"
    except OSError as error:
        return f"{shard.name} cannot be found: {cause(error)}"
    return "" if size == shard.stored_bytes else f"{shard.name} has {size} bytes, but {shard.stored_bytes} were written"
