"""Facts about a dataset from its manifest, without reading items."""

from typing import Any

from penstock.shard.manifest import Manifest

__all__ = ["find_problems", "summarize"]


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
    found = []
    for shard in manifest.shards:
        path = manifest.folder / shard.name
        if not path.exists():
            found.append(f"{shard.name} is missing")
        elif path.stat().st_size != shard.stored_bytes:
            found.append(f"{shard.name} has {path.stat().st_size} bytes, but {shard.stored_bytes} were written")
    return found
