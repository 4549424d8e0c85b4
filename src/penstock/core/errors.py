"""Every error Penstock raises on purpose.

    PenstockError
    ├── OptionError (ValueError)        an argument that cannot work: given, allowed, what to do
    │   ├── SourceError                 data that cannot be a source: no items, fields of different length
    │   └── PlanError                   an order, batch size, seed or window that does not fit the data
    ├── ReadError (OSError)             stored bytes that could not be read; names the source and the items
    │   └── DamageError                 bytes that are not what was written; names shard, item and reason
    ├── WriteError (OSError)            bytes that could not be stored, or a writer used in a way that would lose some
    ├── ConversionError (RuntimeError)  inputs that could not be converted; names each with its reason
    ├── ResumeError (ValueError)        a state that belongs to another data set, seed or order
    ├── WorkerError (RuntimeError)      a worker process died or hung; names the worker and the draw
    ├── LoaderError (RuntimeError)      a loader used in a way that would lose items: closed, or iterated twice at once
    └── MissingDependency (ImportError) an optional package that is not installed; says which extra has it

An exception raised by the user's own code (a dataset, a transform, a collate function) is not wrapped: the very object
arrives at the consumer, with notes that say which draw and which item it was about.
"""

from collections.abc import Mapping

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
    """Anything Penstock raises on purpose."""


class OptionError(PenstockError, ValueError):
    """An argument that cannot work."""


class SourceError(OptionError):
    """Data that cannot be a source."""


class PlanError(OptionError):
    """An order, batch size, seed or window that does not fit the data."""


class ReadError(PenstockError, OSError):
    """Stored bytes that could not be read."""


class DamageError(ReadError):
    """Stored bytes that are not what was written.

    Attributes
    ----------
    shard, item, reason
        The file; the item's number in the whole data set, or None where the damage is not about one item; what is
        wrong.
    """

    def __init__(self, shard: str, item: int | None, reason: str) -> None:
        where = shard if item is None else f"item {item} in {shard}"
        super().__init__(f"Damaged: {where}: {reason}")
        self.shard, self.item, self.reason = shard, item, reason

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        return type(self), (self.shard, self.item, self.reason)


class WriteError(PenstockError, OSError):
    """Bytes that could not be stored, or a writer used in a way that would lose some."""


class ConversionError(PenstockError, RuntimeError):
    """Inputs that could not be converted.

    Attributes
    ----------
    reasons
        Path to reason, for each of them.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        files = "".join(f"\n  {path}: {reason}" for path, reason in reasons.items())
        count = f"{len(reasons)} input{'s' if len(reasons) > 1 else ''}"
        super().__init__(
            f"{count} could not be converted, and nothing was published:{files}\n"
            "Mend or leave out these files, or use on_bad='skip' (--skip-bad) to go on without them."
        )
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type, tuple[dict[str, str]]]:
        return type(self), (self.reasons,)


class ResumeError(PenstockError, ValueError):
    """A saved state that does not belong to this loader."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process died or hung."""


class LoaderError(PenstockError, RuntimeError):
    """A loader used in a way that would lose items."""


class MissingDependency(PenstockError, ImportError):  # noqa: N818  # named for what the reader has to do something about
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}; install it with: pip install 'penstock[{extra}]'")
        self._arguments = (package, extra, purpose)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), self._arguments
