"""The environment of other packages, `.venv-peers`, with versions that are pinned in `constraints/peers.txt`.

Theirs and ours cannot be installed together: MosaicML streaming, for one, needs an older numpy. A contender that needs
a peer runs in a process of that environment, in the same run as all the others.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["cellmap_python", "has_peer", "kind_of", "peer_versions", "peers_python", "python_with"]

_ROOT = Path(__file__).parent.parent
_DISTRIBUTIONS = {
    "webdataset": "webdataset",
    "litdata": "litdata",
    "streaming": "mosaicml-streaming",
    "grain": "grain",
    "torchdata": "torchdata",
    "spdl": "spdl",
    "array_record": "array_record",
    "datasets": "datasets",
    "zarrs": "zarrs",
    "tensorstore": "tensorstore",
    "cellmap_data": "cellmap-data",
}
"""How the packages are called that have the modules of peers."""

_IN_OURS = ("datasets",)
"""Peers that our own environment has in a newer version, since tests use them."""

_LIMITS = ("limit", "the same bytes", "sequential reading", "random reading", "obstore", "a loop")
_PEERS = (
    "webdataset",
    "litdata",
    "MosaicML",
    "SPDL",
    "grain",
    "ArrayRecord",
    "Hugging Face",
    "datasets",
    "torch DataLoader",
    "torchdata",
    "zarr-python",
    "zarrs",
    "tensorstore",
    "cellmap-data",
    "pyarrow",
)
"""How the names of contenders begin that are not ours."""


def kind_of(contender: str) -> str:
    """Return what a contender is by its name: `limit`, `peer` or `ours`."""
    if contender.startswith(_LIMITS):
        return "limit"
    return "peer" if contender.startswith(_PEERS) else "ours"


def peers_python() -> Path | None:
    """Return the interpreter of the peers, if there is one: PENSTOCK_PEERS_PYTHON, or of `make .venv-peers/.ready`."""
    return _find("PENSTOCK_PEERS_PYTHON", ".venv-peers")


def cellmap_python() -> Path | None:
    """Return the interpreter of cellmap-data: PENSTOCK_CELLMAP_PYTHON, or what `make .venv-cellmap/.ready` made."""
    return _find("PENSTOCK_CELLMAP_PYTHON", ".venv-cellmap")


def _find(variable: str, folder: str) -> Path | None:
    path = Path(os.environ.get(variable) or _ROOT / folder / "bin" / "python")
    return path if path.exists() else None


def python_with(module: str) -> Path | None:
    """Return the interpreter of the environment that a module of a peer belongs to, if there is one."""
    if module in _IN_OURS:
        return Path(sys.executable)
    return cellmap_python() if module == "cellmap_data" else peers_python()


@functools.cache
def has_peer(module: str) -> bool:
    """Return whether the environment that a module of a peer belongs to has it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    python = python_with(module)
    return python is not None and subprocess.run([str(python), "-c", code], check=False).returncode == 0


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers that are installed."""
    found = {}
    for python in {python_with(module) for module in _DISTRIBUTIONS} - {None}:
        names = [name for module, name in _DISTRIBUTIONS.items() if python_with(module) == python]
        code = (
            f"import importlib.metadata as m\nfor name in {names!r}:\n"
            " try: print(name, m.version(name))\n except m.PackageNotFoundError: pass"
        )
        told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
        found |= dict(line.split(" ", 1) for line in told.splitlines())
    return {name: found[name] for name in _DISTRIBUTIONS.values() if name in found}
