"""Convert recordings to tar shards with one call."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.convert.convert import convert
from penstock.convert.engines import Engine, LocalEngine
from penstock.convert.formats import Format, ReadOptions, expanded, inputs_of
from penstock.convert.inputs.function import FunctionInput
from penstock.convert.inputs.protocol import Input
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import OptionError
from penstock.observe.progress import phases
from penstock.shard.manifest import Manifest

__all__ = ["convert_to_shards", "summaries"]

_Path = str | os.PathLike[str]


def convert_to_shards(
    inputs: _Path | Sequence[_Path | Input],
    output_dir: _Path,
    *,
    format: Format | Callable[[Path], Iterable[Any]] = "auto",  # noqa: A002  # the document's name
    reading: ReadOptions | None = None,
    options: ConvertOptions | None = None,
    workers: int = 1,
    engine: Engine | None = None,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Turn recordings into tar shards, and return what the manifest says; with a split, that of each part, by name.

    The result has the same bytes for any number of workers, on any engine, interrupted and resumed or not.

    Parameters
    ----------
    inputs
        Files, patterns (`"data/*.nwb"`), folders of audio, zarr stores, folders of shards, or inputs made by hand.
    output_dir
        The folder of the data set; with a split, of one folder for each part.
    format
        `"auto"`, what all inputs are, or a function that takes a path and yields samples.
    reading
        How inputs are read: windows, fields, rates.
    options
        How shards are written: their size, the split, the shuffle, statistics, what happens to bad inputs.
    workers
        Processes that write shards at once.
    engine
        Who does the work instead: a `DaskEngine`.
    resume
        Go on where an interrupted call stopped.
    overwrite
        Replace what is in the folder.
    show_progress
        Tell how far it is, on standard error.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "rows.npy", np.arange(12).reshape(6, 2))
    >>> convert_to_shards(folder / "rows.npy", folder / "shards")["total_samples"]
    6
    """
    if engine is not None and workers != 1:
        raise OptionError(
            f"workers={workers} and engine={engine!r}: an engine has workers of its own; give one of them."
        )
    found, where = _inputs(inputs, format, reading), Path(output_dir)
    engine = engine if engine is not None else LocalEngine(workers)
    with phases(show=show_progress) as told:
        return summaries(convert(found, where, options, engine=engine, resume=resume, overwrite=overwrite, told=told))


def summaries(manifests: dict[str, Manifest]) -> dict[str, Any]:
    """Return what the manifests of a conversion say: one by itself, several by name."""
    if list(manifests) == [""]:
        return manifests[""].summary()
    return {name: manifest.summary() for name, manifest in manifests.items()}


def _inputs(
    given: _Path | Sequence[_Path | Input],
    format: Format | Callable[[Path], Iterable[Any]],  # noqa: A002
    reading: ReadOptions | None,
) -> list[Input]:
    each = [given] if isinstance(given, str | os.PathLike) else list(given)
    paths = [Path(entry) for entry in each if isinstance(entry, str | os.PathLike)]
    ready: list[Input] = [entry for entry in each if not isinstance(entry, str | os.PathLike)]
    if callable(format):
        return [*ready, *(FunctionInput(path, format) for path in expanded(paths))]
    return [*ready, *(inputs_of(paths, format, reading) if paths else ())]
