"""The examination: everything that can be found out about this installation, this machine and a folder."""

import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import OptionError, PenstockError, SourceError
from penstock.core.text import cause
from penstock.doctor.finding import Examination, Finding, Progress
from penstock.doctor.installation import REQUIRED, examine_installation
from penstock.doctor.machine import examine_machine
from penstock.doctor.probe import run_probe
from penstock.doctor.storage import examine_storage
from penstock.files.kinds import local_path
from penstock.files.stores.url import Url, is_url, parse_place

if TYPE_CHECKING:
    from penstock.files.stores.options import StoreOptions

__all__ = ["examine"]

_PATTERN = "{*?["


def examine(
    where: str | os.PathLike[str] | None = None,
    *,
    store: "StoreOptions | None" = None,
    on_progress: Progress | None = None,
) -> Examination:
    """Examine this installation, this machine and, if it is given, a folder or URL of data. Nothing is changed.

    Parameters
    ----------
    where
        The folder of a dataset, of several datasets or of a run, a zarr store, any other folder, or the pattern that
        archives were indexed with; or the URL of a dataset or a zarr store. For None and a URL, the temporary folder
        stands in for its storage.
    store
        How a URL is reached; None: by the environment.
    on_progress
        Progress callback `(phase, unit, done, total, current)`.
    """
    progress = on_progress or (lambda *_: None)
    if where is not None and is_url(where):
        return _examine_url(where, store, progress)
    if store is not None:
        raise OptionError("store is for URLs, got none. Leave it out.")
    path = None if where is None else local_path(where)
    if path is not None and not os.path.lexists(path) and not set(path.name) & set(_PATTERN):
        raise SourceError(f"No such file or folder: {where}.")
    probed = run_probe(list(REQUIRED), progress)
    findings = [*examine_installation(probed), *examine_machine(probed)]
    folder = _find_folder(path)
    findings += _examine_storage(folder, progress, is_own=path is None)
    if where is not None:
        findings += _examine_data(os.fspath(where), progress)
    return Examination(path, tuple(findings))


def _examine_url(where: str | os.PathLike[str], store: "StoreOptions | None", progress: Progress) -> Examination:
    url = parse_place(where)
    assert isinstance(url, Url), "as was checked"
    probed = run_probe(list(REQUIRED), progress)
    findings = [*examine_installation(probed), *examine_machine(probed)]
    findings += _examine_storage(_find_folder(None), progress, is_own=True)
    try:
        from penstock.doctor.url import examine_url  # noqa: PLC0415  # imports numpy, which may be missing
    except ImportError as error:
        found = f"{url} cannot be examined: {error}."
        advice = "Install the packages that are named above."
        return Examination(url, (*findings, Finding("data.kind", "problem", found, advice, where=str(url))))
    return Examination(url, (*findings, *examine_url(url, store, progress)))


def _find_folder(path: Path | None) -> Path:
    """Return the folder whose storage is measured."""
    if path is None:
        return Path(tempfile.gettempdir())
    return path if path.is_dir() else path.parent


def _examine_storage(folder: Path, progress: Progress, *, is_own: bool) -> Iterator[Finding]:
    try:
        yield from examine_storage(folder, progress, is_own=is_own, files=_large_files(folder))
    except OSError as error:
        found = f"The storage of {folder} cannot be measured: {error.strerror or error}."
        yield Finding(
            "storage.speed",
            "warning",
            found,
            "See whether the folder can be used.",
            f"ls -ld -- {shlex.quote(str(folder))}",
        )


def _large_files(folder: Path) -> Iterator[Path]:
    from penstock.doctor.folder import find_large_files  # noqa: PLC0415  # imports numpy, which may be missing

    yield from find_large_files(folder)


def _examine_data(where: str, progress: Progress) -> Iterator[Finding]:
    try:
        from penstock.doctor.folder import examine_data  # noqa: PLC0415  # imports numpy, which may be missing
    except ImportError as error:
        found = f"{where} cannot be examined: {error}."
        yield Finding("data.kind", "problem", found, "Install the packages that are named above.", where=where)
        return
    try:
        yield from examine_data(where, progress)
    except (PenstockError, OSError) as error:
        found = f"{where} cannot be examined further: {cause(error)}."
        yield Finding("data.kind", "problem", found, "See whether the folder can be used.", where=where)
