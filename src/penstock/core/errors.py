"""Every error Penstock raises on purpose.

    PenstockError
    ├── OptionError (ValueError)        invalid argument: what is required, what was given, what to do
    │   ├── SourceError                 data that is no valid source: no items, fields of different length
    │   └── PlanError                   order, batch size, seed or window that does not fit the data
    ├── ReadError (OSError)             stored bytes could not be read; names the source and the items
    │   └── DamageError                 stored bytes differ from what was written; names shard, item and reason
    ├── WriteError (OSError)            bytes could not be stored, or a misused writer would lose some
    ├── ConversionError (RuntimeError)  inputs could not be converted; names each with its reason
    ├── ResumeError (ValueError)        state of another dataset, seed or order
    ├── WorkerError (RuntimeError)      a worker process died or hung; names the worker and the draw
    ├── LoaderError (RuntimeError)      a misused loader would lose items: closed, or iterated twice at once
    └── MissingDependency (ImportError) an optional package is not installed; names the extra that has it

An exception raised by user code (a dataset, a transform, a collate function) is not wrapped: the consumer gets the same
object, with notes that name the draw and the item.
"""

from collections.abc import Mapping

from penstock.core.text import count, name_once

__all__ = [
    "ConversionError",
    "DamageError",
    "LoaderError",
    "MissingDependency",
    "OptionError",
    "PenstockError",
    "PlanError",
    "ReadError",
    "ResumeError",
    "SourceError",
    "WorkerError",
    "WriteError",
]


class PenstockError(Exception):
    """Base class of all errors that Penstock raises on purpose."""


class OptionError(PenstockError, ValueError):
    """Invalid argument."""


class SourceError(OptionError):
    """Data that is no valid source."""


class PlanError(OptionError):
    """Order, batch size, seed or window that does not fit the data."""


class ReadError(PenstockError, OSError):
    """Stored bytes could not be read."""


class DamageError(ReadError):
    """Stored bytes differ from what was written.

    Attributes
    ----------
    shard
        The damaged file.
    item
        Number of the item in the whole dataset; None if the damage does not concern a single item.
    reason
        What is wrong.
    """

    def __init__(self, shard: str, item: int | None, reason: str) -> None:
        where = shard if item is None else f"item {item} in {shard}"
        super().__init__(f"Damaged: {where}: {reason}")
        self.shard, self.item, self.reason = shard, item, reason

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        return type(self), (self.shard, self.item, self.reason)


class WriteError(PenstockError, OSError):
    """Bytes could not be stored, or a writer was used in a way that would lose some."""


class ConversionError(PenstockError, RuntimeError):
    """Inputs could not be converted.

    Attributes
    ----------
    reasons
        Reason by path, one for each input that failed.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        files = "".join(f"\n  {line}" for line in _group_reasons(reasons))
        them, this = ("it", "this file") if len(reasons) == 1 else ("them", "these files")
        super().__init__(
            f"{count(len(reasons), 'input')} could not be converted, and nothing was published:{files}\n"
            f"Repair or remove {this}, or use on_bad='skip' to continue without {them}."
        )
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type, tuple[dict[str, str]]]:
        return type(self), (self.reasons,)


def _group_reasons(reasons: Mapping[str, str]) -> list[str]:
    """Return lines that name inputs with their reasons. Inputs with the same reason share a line; there are 17 at most.

    Of several reasons, only the first line of each is shown.
    """
    if len(reasons) == 1:
        return [name_once(path, reason) for path, reason in reasons.items()]
    groups: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        groups.setdefault(reason.partition("\n")[0], []).append(path)
    lines = []
    for reason, paths in groups.items():
        names = f"{len(paths):,} inputs ({', '.join(paths[:3])}{', …' if len(paths) > 3 else ''})"
        lines.append(name_once(paths[0], reason) if len(paths) == 1 else f"{names}: {reason}")
    if len(lines) > 17:
        rest = sum(len(paths) for paths in list(groups.values())[16:])
        lines = [*lines[:16], f"… and {rest:,} more."]
    return lines


class ResumeError(PenstockError, ValueError):
    """Saved state that does not belong to this loader."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process died or hung."""


class LoaderError(PenstockError, RuntimeError):
    """A loader was used in a way that would lose items."""


class MissingDependency(PenstockError, ImportError):  # noqa: N818  # names what the reader has to fix
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        what = f"'penstock[{extra}]'" if extra else package
        super().__init__(f"{purpose} needs {package}; install it with: pip install {what}")
        self._arguments = (package, extra, purpose)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), self._arguments
