"""Lazy exports: a package writes its public names once, in `__init__.pyi`, and each is loaded on first use.

Type checkers and editors read the same stub, so that what they see and what can be imported never differ. Only modules
that every Python has loaded at its start are imported here: `import penstock` takes less than a millisecond.
"""

import os
import sys
from collections.abc import Callable

__all__ = ["open_door"]


def open_door(
    package: str, file: str, *, aliases: str | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose stub lists its names.

    Parameters
    ----------
    package, file
        `__name__` and `__file__` of the package; its stub lies beside `file`.
    aliases
        Stub of names that can be imported too, without being listed; relative to the package's folder.
    """
    folder = os.path.dirname(file)  # noqa: PTH120  # pathlib takes longer to import than all of this
    homes = _read_stub(folder, "__init__.pyi")
    namespaces = {name for name, home in homes.items() if home == package}
    listed = sorted(name for name in homes if name not in namespaces and not name.startswith("_"))

    def load(name: str) -> object:
        if name in namespaces:
            return _import(f"{package}.{name}")
        home = homes.get(name) or (aliases and _read_stub(folder, aliases).get(name))
        if not home:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{_find_near(folder, package, name, homes)}"
            )
        value = getattr(_import(home), name)
        if isinstance(value, type) and not home.startswith("penstock.core."):  # whose values are made for each read
            _name_options(value)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(homes), listed


def _read_stub(folder: str, name: str) -> dict[str, str]:
    """Return the module that each name of a stub is imported from: the lines `from MODULE import NAME as NAME`."""
    with open(os.path.join(folder, name), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        lines = [line.split() for line in file]
    return {words[3]: words[1] for words in lines if len(words) == 6 and words[0] == "from" and words[4] == "as"}


def _find_near(folder: str, package: str, name: str, homes: dict[str, str]) -> str:
    """Return where else a name is, or which name is meant; empty if neither is known."""
    if name.startswith("_"):  # asked for by tools
        return ""
    import difflib  # noqa: PLC0415  # for errors only

    root = os.path.join(folder, *[os.pardir] * package.count("."))  # noqa: PTH118
    for room in sorted(os.listdir(root)):  # noqa: PTH208
        stub = os.path.join(room, "__init__.pyi")  # noqa: PTH118
        if os.path.isfile(os.path.join(root, stub)) and name in _read_stub(root, stub):  # noqa: PTH113, PTH118
            return f". Use `from {package.partition('.')[0]}.{room} import {name}`."
    near = difflib.get_close_matches(name, homes, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def _name_options(kind: type) -> None:
    """Let a class name the nearest option if it is given one that it does not have, as Python does itself from 3.13 on.

    The class is changed, not replaced: it is pickled and compared by its module and name.
    """
    init: Callable[..., None] = kind.__init__  # type: ignore[misc]  # that of instances
    if not isinstance(init, type(open_door)) or init.__module__[:9] != "penstock." or "__wrapped__" in vars(init):
        return

    def init_or_name(self: object, /, *args: object, **options: object) -> None:
        try:
            init(self, *args, **options)
        except TypeError as error:
            text = str(error)
            _, mark, rest = text.partition("__init__() got an unexpected keyword argument '")
            if mark and rest[:-1] in options:
                import inspect  # noqa: PLC0415  # for errors only

                from penstock.core.text import did_you_mean  # noqa: PLC0415

                inits = [vars(each).get("__init__") for each in kind.__mro__]
                found = [inspect.signature(each) for each in inits if isinstance(each, type(open_door))]
                near = did_you_mean(rest[:-1], [name for each in found for name in each.parameters])
                error.args = (f"{text}.{near}" if near else text,)
            raise

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(init_or_name, name, getattr(init, name))
    vars(init_or_name)["__wrapped__"] = init  # where signatures are looked up
    type.__setattr__(kind, "__init__", init_or_name)


def _import(module: str) -> object:
    __import__(module)
    return sys.modules[module]
