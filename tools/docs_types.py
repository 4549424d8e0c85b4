"""Writes out the names of types that are short in the source, so that the reference says what may be given.

An extension of griffe, named in mkdocs.yml. A signature says `tail: Tail` and `path: _Path`, which no reader of the
site can look up: `Literal["drop", "short", "pad"]` and `str | PathLike[str]` are put in their place. Names that
Penstock exports, such as `Block`, stay: they have entries of their own.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import griffe

__all__ = ["WrittenOutTypes"]

_EXPORT = re.compile(r"^from penstock\.[\w.]+ import (\w+) as \1$", re.M)
_PACKAGE = Path(__file__).parents[1] / "src" / "penstock"


class WrittenOutTypes(griffe.Extension):
    """Replaces names of types in all annotations of the package."""

    def __init__(self) -> None:
        self._package: griffe.Module | None = None
        self._public: set[str] = set()

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through everything, once all modules are known."""
        self._package = pkg
        self._public = {name for stub in _PACKAGE.rglob("__init__.pyi") for name in _EXPORT.findall(stub.read_text())}
        self._walk(pkg)

    def _walk(self, found: griffe.Object | griffe.Alias) -> None:
        if isinstance(found, griffe.Alias):
            return
        if isinstance(found, griffe.Function):
            found.returns = self._written(found.returns)
            for parameter in found.parameters:
                parameter.annotation = self._written(parameter.annotation)
        elif isinstance(found, griffe.Attribute):
            found.annotation = self._written(found.annotation)
        for member in found.members.values():
            self._walk(member)

    def _written(self, annotation: Any) -> Any:
        """Return an annotation, or a part of one, with the names of types written out."""
        if isinstance(annotation, griffe.ExprName):
            meant = self._meant(annotation)
            return annotation if meant is None else self._written(meant)
        if isinstance(annotation, list):
            return [self._written(part) for part in annotation]
        if isinstance(annotation, griffe.ExprAttribute) or not isinstance(annotation, griffe.Expr):
            return annotation
        parts = {field.name: getattr(annotation, field.name) for field in dataclasses.fields(annotation)}
        return dataclasses.replace(annotation, **{name: self._written(part) for name, part in parts.items()})

    def _meant(self, name: griffe.ExprName) -> griffe.Expr | None:
        """Return what a name of this package stands for; None for classes, public names, and names of others."""
        assert self._package is not None, "names are looked up after the package was loaded"
        path = name.canonical_path
        if name.name in self._public or not path.startswith(f"{self._package.path}."):
            return None
        try:
            found = self._package[path.removeprefix(f"{self._package.path}.")]
        except KeyError:
            return None
        if not found.is_attribute or not isinstance(found.value, griffe.ExprSubscript | griffe.ExprBinOp):
            return None
        return found.value
