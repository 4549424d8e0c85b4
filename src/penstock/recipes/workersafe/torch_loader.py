"""Start and end the worker processes of torch's own DataLoader."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["end_iterator", "end_workers", "ignore_worker_count_warning"]


@contextmanager
def ignore_worker_count_warning() -> Iterator[None]:
    """Silence torch's warning about more workers than cores: the number of workers is the user's choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def end_workers(*loaders: Any) -> None:
    """End the processes of torch DataLoaders now, even if an exception still refers to the loaders."""
    for loader in loaders:
        end_iterator(getattr(loader, "_iterator", None))
        loader._iterator = None


def end_iterator(iterator: Any) -> None:
    """End the processes of an iterator of a torch DataLoader, if it has any."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
