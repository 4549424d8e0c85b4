"""Lazy exports: a package writes its public names once, in `__init__.pyi`, and each is loaded on first use.

Type checkers and editors read the same stub, so that what they see and what can be imported never differ.
"""

import ast
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["open_door"]


def open_door(
    package: str, file: str, *, aliases: str | None = None, deprecated: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose stub lists its names.

    Parameters
    ----------
    package, file
        `__name__` and `__file__` of the package; its stub lies beside `file`.
    aliases
        Stub of names that can be imported too, without being listed; relative to the package's folder.
    deprecated
        Stub of names that can be imported too, with a DeprecationWarning that names their new place.
    """
    folder = Path(file).parent
    homes = _read_stub(folder / "__init__.pyi")
    namespaces = {name for name, home in homes.items() if home == package}

    def load(name: str) -> Any:
        if name in namespaces:
            return import_module(f"{package}.{name}")
        home = homes.get(name) or (aliases and _read_stub(folder / aliases).get(name))
        if home:
            value = getattr(import_module(home), name)
            setattr(sys.modules[package], name, value)
            return value
        moved = deprecated and _read_stub(folder / deprecated).get(name)
        if not moved:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        message = f"`from {package} import {name}` is deprecated; use `from {moved} import {name}`."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(moved), name)

    listed = sorted(name for name in homes if name not in namespaces and not name.startswith("_"))
    return load, lambda: sorted(homes), listed


@cache
def _read_stub(path: Path) -> dict[str, str]:
    """Return the module that each name of a stub is imported from."""
    body = ast.parse(path.read_bytes()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names if alias.name != "*"}
