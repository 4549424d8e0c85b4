"""Convert recordings to tar shards with one call."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from penstock.convert.convert import convert, existing_from_flags
from penstock.convert.engines import choose_engine
from penstock.convert.formats import Format, ReadOptions, expand_paths, inputs_of
from penstock.convert.inputs.function import FunctionInput, find_beside
from penstock.convert.inputs.protocol import Input, input_place
from penstock.convert.scan import ConvertOptions, join_notes
from penstock.core.errors import OptionError
from penstock.files.progress import track_phases
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, is_url, parse_place
from penstock.shard.manifest import Manifest

__all__ = ["choose_store", "convert_to_shards", "list_notes", "log_notes", "summaries"]

_LOG = logging.getLogger("penstock")

_Path = str | os.PathLike[str] | Url


def convert_to_shards(
    inputs: _Path | Sequence[_Path | Input],
    output_dir: _Path,
    *,
    format: Format | Callable[[Path], Iterable[Any]] = "auto",  # noqa: A002  # a public name
    reading: ReadOptions | None = None,
    options: ConvertOptions | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
    store: StoreOptions | None = None,
) -> dict[str, Any]:
    """Convert recordings to tar shards and return the summary of the manifest; with a split, one summary per name.

    The bytes are the same for any number of workers, on any engine, interrupted and resumed or not.

    Parameters
    ----------
    inputs
        Files, patterns (`"data/*.nwb"`), folders of audio, zarr stores, folders of shards, URLs of them
        (`"s3://bucket/raw/*.nwb"`), or `Input` objects.
    output_dir
        The folder or URL of the dataset; with a split, the one that holds one dataset per split.
    format
        `"auto"`, the format of all inputs, or a function that takes a path and yields items.
    reading
        How inputs are read: windows, fields, rates.
    options
        How shards are written: their size, split, and what to do with bad inputs.
    workers
        Number of processes that write shards; with an executor, about how many work items it does at once.
    executor
        Runs the work instead of local processes: any executor of `concurrent.futures`, such as dask's
        `client.get_executor(pure=False)`. It stays open.
    resume, overwrite
        Resume an interrupted conversion of the same inputs with the same options; replace the dataset that is there.
    show_progress
        Show progress on standard error.
    store
        How URLs are reached, those of inputs unless `reading` says so; None: by the environment.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "rows.npy", np.arange(12).reshape(6, 2))
    >>> convert_to_shards(folder / "rows.npy", folder / "shards")["total_samples"]
    6
    """
    where = parse_place(output_dir)
    each = [inputs] if isinstance(inputs, str | os.PathLike | Url) else list(inputs)
    found, output_store = _make_inputs(each, format, reading, store), choose_store(store, each, where)
    existing = existing_from_flags(resume=resume, overwrite=overwrite)
    with track_phases(show=show_progress) as bar:
        how: dict[str, Any] = {"engine": choose_engine(workers, executor), "existing": existing, "on_progress": bar}
        manifests = convert(found, where, options, store=output_store, **how)
    log_notes(list_notes(manifests), where)
    return summaries(manifests)


def choose_store(store: StoreOptions | None, inputs: Sequence[Any], output: Path | Url) -> StoreOptions | None:
    """Return the store of the output; raise OptionError if neither the output nor an input is a URL."""
    if isinstance(output, Url):
        return store
    if store is not None and not any(map(is_url, inputs)):
        raise OptionError(
            "Options of a store are for URLs, but neither the output nor an input is one. Leave them out."
        )
    return None


def _is_place(given: Any) -> bool:
    return isinstance(given, str | os.PathLike | Url)


def log_notes(notes: Sequence[str], where: Path | Url) -> None:
    """Log at most ten notes."""
    rest = [f"… and {len(notes) - 10:,} more; the manifest has all of them."] if len(notes) > 10 else []
    for note in [*notes[:10], *rest]:
        _LOG.warning("%s: %s", where, note)


def list_notes(manifests: dict[str, Manifest]) -> list[str]:
    """Return what a conversion notes on the datasets as a whole, with a split with the name of each, and on inputs."""
    notes: dict[str, list[str]] = {}
    about = {name: manifest.metadata["conversion"] for name, manifest in manifests.items()}
    for name, one in about.items():
        for note in one.get("notes", ()):
            notes.setdefault(note, []).append(name)
    whole = [note if len(names) == len(manifests) else f"{', '.join(names)}: {note}" for note, names in notes.items()]
    return [*whole, *join_notes((entry["file"], entry["notes"]) for one in about.values() for entry in one["inputs"])]


def summaries(manifests: dict[str, Manifest]) -> dict[str, Any]:
    """Return the summary of the manifest; with a split, the summaries by name."""
    if list(manifests) == [""]:
        return manifests[""].summary()
    return {name: manifest.summary() for name, manifest in manifests.items()}


def _make_inputs(
    each: Sequence[Any],
    format: Format | Callable[[Path], Iterable[Any]],  # noqa: A002
    reading: ReadOptions | None,
    store: StoreOptions | None,
) -> list[Input]:
    paths = [entry for entry in each if _is_place(entry)]
    ready: list[Input] = [entry for entry in each if not _is_place(entry)]
    if not callable(format):
        return [*ready, *(inputs_of(paths, format, reading, store) if paths else ())]
    for url in (path for path in map(input_place, paths) if isinstance(path, Url)):
        raise OptionError(f"A function reads files of this machine, got the URL {url}. Download the file first.")
    files = [path for path in expand_paths(paths) if isinstance(path, Path)]
    return [
        *ready,
        *(FunctionInput(path, format, beside) for path, beside in zip(files, find_beside(files), strict=True)),
    ]
