"""Every error Penstock raises on purpose.

    PenstockError
    ├── OptionError (ValueError)        an argument that cannot work: given, allowed, what to do
    │   ├── SourceError                 data that cannot be a source: no items, fields of different length
    │   └── PlanError                   an order, batch size, seed or window that does not fit the data
    ├── ReadError (OSError)             stored bytes that could not be read; names the source and the items
    ├── ResumeError (ValueError)        a state that belongs to another data set, seed or order
    ├── WorkerError (RuntimeError)      a worker process died or hung; names the worker and the draw
    └── LoaderError (RuntimeError)      a loader used in a way that would lose items: closed, or iterated twice at once

An exception raised by the user's own code (a dataset, a transform, a collate function) is not wrapped: the very object
arrives at the consumer, with notes that say which draw and which item it was about.
"""

__all__ = [
    "LoaderError",
    "OptionError",
    "PenstockError",
    "PlanError",
    "ReadError",
    "ResumeError",
    "SourceError",
    "WorkerError",
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


class ResumeError(PenstockError, ValueError):
    """A saved state that does not belong to this loader."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process died or hung."""


class LoaderError(PenstockError, RuntimeError):
    """A loader used in a way that would lose items."""
