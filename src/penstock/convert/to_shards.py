"""Convert recordings to tar shards with one call."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.convert.convert import convert, existing_from_flags
from penstock.convert.engines import Engine, LocalEngine
from penstock.convert.formats import Format, ReadOptions, expand_paths, inputs_of
from penstock.convert.inputs.function import FunctionInput
from penstock.convert.inputs.protocol import Input
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import OptionError
from penstock.files.kinds import local_path
from penstock.observe.progress import track_phases
from penstock.shard.manifest import Manifest

__all__ = ["convert_to_shards", "list_notes", "summaries"]

_LOG = logging.getLogger("penstock")

_Path = str | os.PathLike[str]


def convert_to_shards(
    inputs: _Path | Sequence[_Path | Input],
    output_dir: _Path,
    *,
    format: Format | Callable[[Path], Iterable[Any]] = "auto",  # noqa: A002  # a public name
    reading: ReadOptions | None = None,
    options: ConvertOptions | None = None,
    workers: int = 1,
    engine: Engine | None = None,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Convert recordings to tar shards and return the summary of the manifest; with a split, one summary per name.

    The result has the same bytes for any number of workers, on any engine, interrupted and resumed or not.

    Parameters
    ----------
    inputs
        Files, patterns (`"data/*.nwb"`), folders of audio, zarr stores, folders of shards, or `Input` objects.
    output_dir
        The folder of the dataset; with a split, the folder that holds one dataset per split.
    format
        `"auto"`, the format of all inputs, or a function that takes a path and yields items.
    reading
        How inputs are read: windows, fields, rates.
    options
        How shards are written: their size, split, shuffling, statistics, and what to do with bad inputs.
    workers
        Number of processes that write shards.
    engine
        Runs the work instead of local processes, such as a `DaskEngine`.
    resume
        Resume an interrupted conversion of the same inputs with the same options.
    overwrite
        Replace the dataset in the folder.
    show_progress
        Show progress on standard error.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "rows.npy", np.arange(12).reshape(6, 2))
    >>> convert_to_shards(folder / "rows.npy", folder / "shards")["total_samples"]
    6
    """
    engine = _choose_engine(workers, engine)
    found, where = _make_inputs(inputs, format, reading), local_path(output_dir)
    existing = existing_from_flags(resume=resume, overwrite=overwrite)
    with track_phases(show=show_progress) as on_progress:
        manifests = convert(found, where, options, engine=engine, existing=existing, on_progress=on_progress)
    return _log_notes(manifests, where)


def _choose_engine(workers: int, engine: Engine | None) -> Engine:
    if engine is not None and workers != 1:
        raise OptionError(
            f"At most one of workers and engine must be given, got workers={workers} and engine={engine!r}. An engine "
            "has workers of its own."
        )
    return engine if engine is not None else LocalEngine(workers)


def _log_notes(manifests: dict[str, Manifest], where: Path) -> dict[str, Any]:
    """Log what concerns the whole dataset, and return the summaries."""
    for note in list_notes(manifests):
        _LOG.warning("%s: %s", where, note)
    return summaries(manifests)


def list_notes(manifests: dict[str, Manifest]) -> list[str]:
    """Return what a conversion notes on the datasets as a whole; with a split, with the name of each."""
    notes: dict[str, list[str]] = {}
    for name, manifest in manifests.items():
        for note in manifest.metadata["conversion"].get("notes", ()):
            notes.setdefault(note, []).append(name)
    return [note if len(names) == len(manifests) else f"{', '.join(names)}: {note}" for note, names in notes.items()]


def summaries(manifests: dict[str, Manifest]) -> dict[str, Any]:
    """Return the summary of the manifest; with a split, the summaries by name."""
    if list(manifests) == [""]:
        return manifests[""].summary()
    return {name: manifest.summary() for name, manifest in manifests.items()}


def _make_inputs(
    given: _Path | Sequence[_Path | Input],
    format: Format | Callable[[Path], Iterable[Any]],  # noqa: A002
    reading: ReadOptions | None,
) -> list[Input]:
    each = [given] if isinstance(given, str | os.PathLike) else list(given)
    paths = [Path(entry) for entry in each if isinstance(entry, str | os.PathLike)]
    ready: list[Input] = [entry for entry in each if not isinstance(entry, str | os.PathLike)]
    if callable(format):
        return [*ready, *(FunctionInput(path, format) for path in expand_paths(paths))]
    return [*ready, *(inputs_of(paths, format, reading) if paths else ())]
