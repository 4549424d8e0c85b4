"""Parts of the remote benchmark with little data: contenders run in processes of their own, as they do there."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import remote
from bench.cold.loaders import Way
from bench.remote import first_batch, streaming, waiting
from bench.remote.items import Items

__all__ = ["LARGE", "run_part", "shrink"]

LARGE = Items("large", {"signal": (20, 10), "behavior": ()}, "behavior", 80, 4, 8)
_MIDDLE = Items("middle", {"signal": (5, 10), "label": ()}, "label", 120, 6, 16)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Let the parts measure little data, one way each, without other libraries."""
    for module in (streaming, waiting, first_batch):
        patch.setattr(module, "LARGE_ITEMS", LARGE)
        patch.setattr(module, "MIDDLE_ITEMS", _MIDDLE)
    one = (Way("windows", "2 threads"),)
    patch.setattr(streaming, "WAYS", {LARGE.name: one, _MIDDLE.name: one})
    patch.setattr(waiting, "WAYS", one)
    patch.setattr(first_batch, "PEERS", ())


def run_part(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run a part once; return the rows of its tables."""
    remote.PARTS[name](folder, folder / "results.json", 1)
    tables = json.loads((folder / "results.json").read_text())["tables"]
    return {name: table["rows"] for name, table in tables.items()}
