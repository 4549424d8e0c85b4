"""All workloads, the most telling ones first: what `python -m bench` runs, how often, and how long that takes.

`python -m bench.workloads NAME FOLDER OUT REPEATS` runs one of them, in a process that may fail without the others.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "WORKLOADS", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload: a function of a folder for its data, the file of the run, and a number of repeats."""

    name: str
    where: str
    """Its module below `bench`, with a function `run`, or with `PARTS` by their names."""

    minutes: float
    """About how long it takes with its own repeats, on two quiet cores."""

    repeats: int
    peers: bool = False
    """Whether other packages are contenders, so that it needs their environment."""

    def load(self) -> Callable[[Path, Path, int], Any]:
        """Return the function."""
        module: Any = import_module(f"bench.{self.where}")
        return module.PARTS[self.name] if hasattr(module, "PARTS") else module.run  # type: ignore[no-any-return]


_ALL = (
    Workload("small_items", "small_items", 4.5, 2, peers=True),
    Workload("shards", "shards", 4.2, 2, peers=True),
    Workload("workers", "workers", 1.8, 1),
    Workload("keeping", "keeping", 1.3, 1),
    Workload("startup", "startup", 0.8, 2),
    Workload("many_shards", "many_shards", 1.0, 1),
    Workload("delivery", "delivery", 1.8, 2),
    Workload("cold-large", "cold", 1.8, 2),
    Workload("remote-stream", "remote", 1.6, 1),
    Workload("remote-first", "remote", 1.3, 1, peers=True),
    Workload("cold-peers", "cold", 1.6, 1, peers=True),
    Workload("chunks", "chunks", 2.2, 2, peers=True),
    Workload("volumes", "volumes", 1.6, 2, peers=True),
    Workload("remote-zarr", "remote", 2.5, 1, peers=True),
    Workload("remote-waiting", "remote", 1.2, 1),
    Workload("tables", "tables", 1.3, 2, peers=True),
    Workload("mixtures", "mixtures", 1.0, 2),
    Workload("order", "order", 0.8, 2),
    Workload("select", "select", 1.5, 1),
    Workload("lengths", "lengths", 0.6, 1),
    Workload("convert", "convert", 1.6, 2),
    Workload("chunked", "chunked", 0.8, 2),
    Workload("streams", "streams", 0.4, 3),
    Workload("imports", "imports", 0.4, 2),
    Workload("tuning", "tuning", 1.0, 1),
    Workload("cold-small", "cold", 1.0, 1),
    Workload("cold-zarr", "cold", 0.9, 1),
    Workload("cold-waiting", "cold", 0.9, 1),
    Workload("cold-warm", "cold", 0.8, 1),
    Workload("cold-shared-memory", "cold", 1.4, 1),
    Workload("cold-whole-files", "cold", 1.7, 1),
    Workload("remote-peers", "remote", 2.2, 1, peers=True),
    Workload("remote-cache", "remote", 1.5, 1),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
GROUPS = {
    "cold": [name for name in WORKLOADS if name.startswith("cold-")],
    "remote": [name for name in WORKLOADS if name.startswith("remote-")],
    "peers": [name for name, workload in WORKLOADS.items() if workload.peers],
    "ours": [name for name, workload in WORKLOADS.items() if not workload.peers],
}


def _main() -> None:
    name, folder, out, repeats = sys.argv[1:]
    WORKLOADS[name].load()(Path(folder), Path(out), int(repeats))


if __name__ == "__main__":
    _main()
