"""Summary of a dataset: totals, fields, bytes and health; and single items."""

import json
import os
import sys
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.text import count
from penstock.files.stores.options import StoreOptions
from penstock.shard.places.open_dataset import open_dataset
from penstock.shard.summary import find_problems, summarize

__all__ = ["ShardedDatasetInfo", "describe_item", "measure_values"]

_OF_CONVERSIONS = ("conversion", "identity")


class ShardedDatasetInfo:
    """Summary of a dataset, from its manifest alone; no data is read.

    Parameters
    ----------
    shard_dir
        The folder of the dataset, or the pattern given to `penstock index`; or the URL of one.
    store
        How to reach a URL.

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

    def __init__(self, shard_dir: str | os.PathLike[str], *, store: StoreOptions | None = None) -> None:
        self.manifest, self._archives = open_dataset(shard_dir, store=store)

    def get_summary(self) -> dict[str, Any]:
        """Return totals, fields and bytes: plain JSON."""
        return {**summarize(self.manifest), "problems": self.problems()}

    def problems(self) -> list[str]:
        """Return missing shards and those whose size has changed; `penstock check --all` reads every byte."""
        return find_problems(self.manifest, self._archives)

    def print_summary(self, out: TextIO | None = None) -> None:
        """Print the summary."""
        summary = self.get_summary()
        problems: list[str] = summary["problems"]
        per_shard = "" if summary["shard_size"] is None else f" of up to {summary['shard_size']:,}"
        size, n_samples = summary["total_bytes"], summary["total_samples"]
        lines = [
            f"Dataset      {self.manifest.folder}",
            f"Samples      {n_samples:,} in {count(summary['total_shards'], 'shard')}{per_shard}",
            f"Size         {size / 1e6:,.1f} MB, {size / max(1, n_samples) / 1e3:,.1f} kB per sample",
            f"Compression  {summary['compression']}",
            *([f"Layout       {summary['layout']}"] if "layout" in summary else []),
            f"Fingerprint  {summary['fingerprint']}",
            f"Health       {problems[0] if problems else 'all shards are present, with the right size'}",
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
        lines += _metadata_lines(summary["metadata"])
        (out or sys.stdout).write("\n".join(lines) + "\n")


def _metadata_lines(metadata: dict[str, Any]) -> list[str]:
    """Return lines about the metadata of the dataset; the conversion is abbreviated."""
    own = {name: value for name, value in metadata.items() if name not in _OF_CONVERSIONS}
    lines = ["", "Metadata", *(f"  {name}: {value}" for name, value in own.items())] if own else []
    converted = metadata.get("conversion")
    if converted:
        files = [f"{entry['file']} ({entry['samples']:,})" for entry in converted["inputs"]]
        lines += ["", f"Converted from {count(len(files), 'input')}", *(f"  {file}" for file in files[:10])]
        lines += [f"  … and {len(files) - 10:,} more"] if len(files) > 10 else []
        lines += [f"  skipped: {entry['file']}: {entry['reason']}" for entry in converted["skipped"]]
    return lines


def describe_item(fields: dict[str, Any]) -> list[str]:
    """Return one line per field of an item."""
    width = max(map(len, fields))
    return [f"{name:<{width}}  {_describe_value(value)}" for name, value in fields.items()]


def measure_values(value: NDArray[Any]) -> dict[str, Any]:
    """Return the range and the mean of an array without its NaNs, and their number if there are any."""
    n_nan = int(np.isnan(value).sum()) if value.dtype.kind == "f" else 0
    known = value[~np.isnan(value)] if n_nan else value
    found = {"min": known.min().item(), "max": known.max().item(), "mean": known.mean().item()} if known.size else {}
    return found | ({"nan": n_nan} if n_nan else {})


def _describe_value(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.ndim:
        kind = f"{value.dtype} {value.shape}"
        if value.dtype.kind not in "biuf" or not value.size:
            return kind
        found = measure_values(value)
        known = "{min:.6g} to {max:.6g}, mean {mean:.6g}".format(**found) if "mean" in found else ""
        nan = f"{found['nan']:,} of {value.size:,} are NaN" if "nan" in found else ""
        return ", ".join(filter(None, (kind, known, nan)))
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {value}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, list | tuple) and any(hasattr(part, "dtype") for part in value):  # sounds, lists of arrays
        return "; ".join(map(_describe_value, value))
    if isinstance(value, torch.Tensor):
        words = f"{value.dtype} {tuple(value.shape)}"
    else:
        words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return words if len(words) <= 200 else f"{words[:199]}…"
