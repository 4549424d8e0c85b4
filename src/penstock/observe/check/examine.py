"""Examine this installation and this machine, or a folder or URL of data."""

import os
from pathlib import Path

from penstock.core.errors import OptionError, SourceError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import is_url
from penstock.observe.check.folder import examine_data
from penstock.observe.check.machine import examine_machine
from penstock.observe.finding import Finding, Progress

__all__ = ["examine"]


def examine(
    where: str | os.PathLike[str] | None = None,
    *,
    store: StoreOptions | None = None,
    on_progress: Progress | None = None,
) -> list[Finding]:
    """Examine data, or this installation and this machine. Nothing is changed, and it takes some seconds.

    Parameters
    ----------
    where
        The folder of a dataset, of several datasets or of runs, a zarr store, any other folder or file, or the pattern
        that archives were indexed with; or the URL of a dataset or a zarr store. None: installation and machine.
    store
        How a URL is reached; None: by the environment.
    on_progress
        Progress callback `(phase, unit, done, total, current)`.
    """
    progress = on_progress or (lambda *_: None)
    if store is not None and (where is None or not is_url(where)):
        raise OptionError("store is for URLs, got none. Leave it out.")
    if where is None:
        return list(examine_machine(progress))
    is_pattern = set("{*?[") & set(Path(where).name)
    if not is_url(where) and not os.path.lexists(where) and not is_pattern:
        raise SourceError(f"No such file or folder: {where}.")
    return list(examine_data(os.fspath(where), progress, store))
