"""What a conversion reads: inputs with a known number of items, each of which can be read at any time.

An `Input` is a small, picklable specification that each worker opens for itself. The `Recording` it opens is the same
in every process: item `i` depends only on the file and the options. So any process can write any shard, in any order,
and the bytes are the same.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url, is_url, parse_place

__all__ = [
    "Input",
    "Recording",
    "Sample",
    "SampleRecording",
    "check_numbers",
    "folder_name",
    "folders_of",
    "ids_of",
    "input_place",
    "local_paths_of",
    "metadata_of",
    "paths_of",
    "remote_of",
]

Sample = tuple[dict[str, Any], dict[str, Any]]
"""The fields of an item, and its metadata, which say where it came from. A `sample_id` in it is the id of the item."""


class Recording(Protocol):
    """An open input.

    1. Bytes cannot be read or are missing: ReadError, which names the file and the place.
    2. The file changes while it is open: not noticed here; the caller compares its stamp.
    """

    n_samples: int
    """Number of items. If there are none, the input is skipped, and the notes say why."""

    about: Mapping[str, Any]
    """Metadata of the recording, as JSON: identifier, subject, session, rates, units. Kept in the manifest."""

    groups: Mapping[str, str]
    """The `"subject"` and `"session"` that the recording belongs to, if known."""

    notes: Sequence[str]
    """What was left out and why, for a person to read."""

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the begin and end of items in the recording, one row each, in seconds or rows."""
        ...

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`. Consecutive items are cheaper to read."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class SampleRecording(Recording, Protocol):
    """An open input whose items have ids, files and groups of their own, such as shards."""

    ids: Sequence[str | None]
    """The id of each item; None for an item without one, and empty if no item has one."""

    def metadata(self, numbers: NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
        """Yield the metadata of items, as `samples` does, without reading fields if that is possible."""
        ...


def metadata_of(recording: Recording) -> Iterator[Mapping[str, Any]]:
    """Yield the metadata of every item; of the first one only, if items differ in nothing but their place."""
    numbers = np.arange(recording.n_samples)
    if hasattr(recording, "metadata"):
        yield from recording.metadata(numbers)
        return
    for _, metadata in recording.samples(numbers[:1]):
        yield metadata


def ids_of(recording: Recording) -> Sequence[str | None]:
    """Return the ids of the items of a recording; none if they have no ids of their own."""
    return getattr(recording, "ids", ())


class Input(Protocol):
    """A recording to open: a frozen dataclass of a path and options."""

    @property
    def path(self) -> Path | Url:
        """The file, or the folder of a zarr store; or its URL. With a URL, `remote` says how it is reached."""
        ...

    def open(self) -> Recording:
        """Open the recording; raise SourceError if it has another format or lacks what the options ask for."""
        ...


def paths_of(given: Input) -> tuple[Path | Url, ...]:
    """Return the files that an input reads: `paths` if it has several, otherwise its path."""
    paths: tuple[Path | Url, ...] = getattr(given, "paths", (given.path,))
    return paths


def local_paths_of(given: Input) -> tuple[Path, ...]:
    """Return those that are on this machine."""
    return tuple(path for path in paths_of(given) if isinstance(path, Path))


def folders_of(given: Input) -> list[Url]:
    """Return the URLs whose metadata say whether a folder at a URL has changed: its own, and those of its arrays."""
    if hasattr(given, "list_folders"):
        return list(given.list_folders())
    return [path for path in paths_of(given) if isinstance(path, Url)]


def remote_of(given: Input) -> RemoteOptions:
    """Return how the URL of an input is reached."""
    found: RemoteOptions | None = getattr(given, "remote", None)
    return found or RemoteOptions()


def input_place(path: str | os.PathLike[str] | Url) -> Path | Url:
    """Return the path of an input as it was given, or its URL."""
    return parse_place(path) if isinstance(path, Url) or is_url(path) else Path(path)


def folder_name(path: Path | Url) -> str:
    """Return the name of the folder of a file."""
    return path.parent.name if isinstance(path, Url) else path.absolute().parent.name


def check_numbers(numbers: NDArray[np.int64], n_samples: int, path: Path | Url) -> NDArray[np.int64]:
    """Return the item numbers as an array; raise ReadError if the recording does not have all of them."""
    checked = np.asarray(numbers, np.int64)
    if len(checked) and (checked.min() < 0 or checked.max() >= n_samples):
        raise ReadError(
            f"Could not read items {checked.min()}–{checked.max()} of {path}: it has items 0–{n_samples - 1}."
        )
    return checked
