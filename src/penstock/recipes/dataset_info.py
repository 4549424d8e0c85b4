"""Seed 004's look at a data set: totals, fields, bytes, health."""

import os
import sys
from typing import Any, TextIO

from penstock.shard.manifest import Manifest, manifest_path

__all__ = ["ShardedDatasetInfo"]


class ShardedDatasetInfo:
    """What a data set holds, from its manifest; nothing of the data is read.

    Parameters
    ----------
    shard_dir
        The folder of the data set, or the pattern that `penstock index` was called with.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from penstock import create_shards_from_arrays
    >>> folder = tempfile.mkdtemp()
    >>> _ = create_shards_from_arrays(folder, {"spikes": np.zeros((5, 100, 96), np.float32)}, shard_size=2)
    >>> ShardedDatasetInfo(folder).get_summary()["total_shards"]
    3
    """

    def __init__(self, shard_dir: str | os.PathLike[str]) -> None:
        self._path = manifest_path(shard_dir)
        self.manifest = Manifest.read(self._path)

    def get_summary(self) -> dict[str, Any]:
        """Return totals, fields and bytes: plain JSON."""
        manifest = self.manifest
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
            "problems": self.problems(),
        }

    def problems(self) -> list[str]:
        """Return the shards that are missing or have another size than they had; `penstock verify` reads every byte."""
        found = []
        for shard in self.manifest.shards:
            path = self.manifest.folder / shard.name
            if not path.exists():
                found.append(f"{shard.name} is missing")
            elif path.stat().st_size != shard.stored_bytes:
                found.append(f"{shard.name} has {path.stat().st_size} bytes, but {shard.stored_bytes} were written")
        return found

    def print_summary(self, out: TextIO | None = None) -> None:
        """Print what `get_summary` returns, for a person."""
        summary = self.get_summary()
        problems: list[str] = summary["problems"]
        per_shard = "" if summary["shard_size"] is None else f" of up to {summary['shard_size']:,}"
        size, count = summary["total_bytes"], summary["total_samples"]
        lines = [
            f"Data set     {self.manifest.folder}",
            f"Samples      {count:,} in {summary['total_shards']:,} shards{per_shard}",
            f"Size         {size / 1e6:,.1f} MB, {size / max(1, count) / 1e3:,.1f} kB per sample",
            f"Compression  {summary['compression']}",
            f"Fingerprint  {summary['fingerprint']}",
            f"Health       {problems[0] if problems else 'every shard is there, with the right size'}",
            *(f"             {problem}" for problem in problems[1:10]),
            *([f"             and {len(problems) - 10} more"] if len(problems) > 10 else []),
            "",
            "Fields",
        ]
        width = max(len(name) for name in summary["fields"])
        for name, field in summary["fields"].items():
            shape = "varies" if field["shape"] is None else str(tuple(field["shape"]))
            kind = f"{field['dtype'] or ''} {shape if field['dtype'] else ''}".strip()
            lines.append(f"  {name:<{width}}  .{field['stored_as']:<5} {kind}".rstrip())
        if summary["metadata"]:
            lines += ["", "Metadata", *(f"  {name}: {value}" for name, value in summary["metadata"].items())]
        (out or sys.stdout).write("\n".join(lines) + "\n")
