"""The unit of work of a conversion: one shard, written from its task alone.

A task says which items of which inputs make up a shard. Two processes that are given the same task write the same
bytes, so it does not matter which process writes a shard, when, or how often.
"""

import json
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.fingerprint import Stamp, stamp_input
from penstock.convert.inputs.protocol import Input, Recording, Sample, paths_of
from penstock.core.cache import SharedCache
from penstock.core.errors import OptionError, PenstockError, ReadError, SourceError, WriteError
from penstock.core.text import cause, name_once
from penstock.files.stores.url import Url
from penstock.shard.names import automatic_key, encode_key, is_automatic
from penstock.shard.outputs.place import ShardFolder
from penstock.shard.outputs.write_options import Shard, WriteOptions, open_shard
from penstock.shard.sample_form import SampleForm

__all__ = [
    "InputError",
    "Label",
    "Task",
    "check_unchanged",
    "close_recordings",
    "count_empty",
    "write_task",
]

_LABEL = "label"
_MAX_OPEN = 4


class InputError(ReadError):
    """An input that could not be read, or that changed during the conversion."""

    def __init__(self, path: Path | Url, reason: str) -> None:
        super().__init__(name_once(path, reason))
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[Path | Url, str]]:
        return type(self), (self.path, self.reason)


@dataclass(frozen=True, slots=True)
class Label:
    """The field `label`: the place of the value of a metadata column among all values."""

    column: str
    classes: tuple[Any, ...]

    def add_to(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples with their labels."""
        places = {value: np.int64(place) for place, value in enumerate(self.classes)}
        for sample, metadata in samples:
            if _LABEL in sample:
                raise SourceError(
                    f"Items that get a label from the column {self.column!r} must have no field {_LABEL!r} of their "
                    "own. Rename it."
                )
            yield {**sample, _LABEL: places[metadata[self.column]]}, metadata


@dataclass(frozen=True, slots=True)
class Task:
    """What one shard is made of."""

    writing: ShardFolder
    """Where the shard is written."""

    number: int
    """The number of the shard."""

    first: int
    """The number of its first item in the dataset."""

    options: WriteOptions
    inputs: tuple[Input, ...]
    stamps: tuple[Stamp, ...]
    """The stamp of each input when it was scanned."""

    which: NDArray[np.int64]
    """The input of each item, as an index into `inputs`."""

    numbers: NDArray[np.int64]
    """The number of each item in its input."""

    columns: tuple[Mapping[str, Any], ...] = ()
    """Metadata to add to each item; empty if there are none."""

    label: Label | None = None
    keep_ids: bool = False
    """Whether items keep ids of their own; otherwise these are in the metadata as `original_id`."""

    @property
    def name(self) -> str:
        """The file name of the shard."""
        return self.options.shard_name(self.number)

    def __str__(self) -> str:
        return f"{self.name}, made from {', '.join(str(given.path) for given in self.inputs)}"


def write_task(task: Task) -> int:
    """Write one shard and return its number of items."""
    form, empty = SampleForm(task.options.array_format), Counter[str]()
    try:
        with ExitStack() as stack:
            shard: Shard | None = None
            for number, (sample, about) in enumerate(_read_items(task), task.first):
                sample_id, metadata = _identify(about, number, keep=task.keep_ids)
                members = form.encode(sample, number, encode_key(sample_id), sample_id, metadata)
                if shard is None:
                    shard = open_shard(task.writing, task.options, task.number, task.first, members.n_bytes)
                    stack.enter_context(shard)
                form.add(members, shard, task.number)
                empty.update(_find_empty(sample))
                _check_size(shard, task.options)
            if empty:
                task.writing.write_note(_empty_name(task.name), json.dumps(empty).encode())
            assert shard is not None, "a task has at least one item"
            n_items = shard.close()[0].n_items
            task.writing.wait()
            return n_items
    except PenstockError:
        raise
    except OSError as error:
        raise WriteError(f"Could not write {task.name} in {task.writing}: {cause(error)}.") from error


def check_unchanged(scanned: tuple[Input, Stamp]) -> None:
    """Raise InputError if an input has been written to since it was scanned."""
    given, stamp = scanned
    if stamp_input(given) != stamp:
        several = "it or a file beside it" if len(paths_of(given)) > 1 else "the file"
        what = "a file in it" if stamp.is_folder else several
        raise InputError(given.path, f"{what} changed while it was converted; wait until it is complete")


def count_empty(writing: ShardFolder, names: Sequence[str]) -> Counter[str]:
    """Return, by field, the number of items of shards in which the field is NaN throughout."""
    noted = writing.read_notes(list(map(_empty_name, names)))
    return sum((Counter(json.loads(stored)) for stored in noted if stored is not None), start=Counter[str]())


def close_recordings() -> None:
    """Close the recordings that earlier tasks of this thread left open for later ones."""
    _OPENED.cache.clear()


def _identify(about: Mapping[str, Any], number: int, *, keep: bool) -> tuple[str, dict[str, Any]]:
    """Return the id of an item, and its metadata without it."""
    metadata = dict(about)
    own = metadata.pop("sample_id", None)
    if own is None or (keep and not is_automatic(own)):
        return own or automatic_key(number), metadata
    return automatic_key(number), {"original_id": own, **metadata}


def _read_items(task: Task) -> Iterator[Sample]:
    """Yield the items of a shard, with added columns and label. Every error names the input it came from."""
    borders = (np.flatnonzero(np.diff(task.which)) + 1).tolist()
    for start, stop in zip([0, *borders], [*borders, len(task.which)], strict=True):
        given, stamp = task.inputs[task.which[start]], task.stamps[task.which[start]]
        opened = None
        try:
            opened = _OPENED.get(given, stamp)
            samples = opened.recording.samples(task.numbers[start:stop])
            if task.columns:
                added = task.columns[start:stop]
                samples = ((sample, {**about, **more}) for (sample, about), more in zip(samples, added, strict=True))
            yield from samples if task.label is None else task.label.add_to(samples)
            if not stamp.is_folder:  # which is listed once, after the last shard
                check_unchanged((given, stamp))
        except InputError:
            raise
        except (PenstockError, OSError) as error:
            raise InputError(given.path, str(error)) from error
        except Exception as error:
            error.add_note(f"[penstock] while converting {given.path}")
            raise
        finally:
            del opened  # or a traceback would keep the recording open


def _find_empty(sample: dict[str, Any]) -> Iterator[str]:
    """Yield the fields that are NaN throughout, but not those that were filled in."""
    for name, value in sample.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not value.size:
            continue
        # One value is looked at before all are, because most fields begin with a number.
        if np.isnan(value.flat[0]) and np.isnan(value).all() and sample.get(f"has_{name}", True):
            yield name


def _check_size(shard: Shard, options: WriteOptions) -> None:
    limit = options.most_tar_bytes
    if limit is not None and shard.tar_bytes > limit:
        raise OptionError(
            f"A shard with compression={options.compression!r} must have at most {limit} bytes, got more with "
            f"{options.shard_size} items. Use a smaller shard_size."
        )


def _empty_name(name: str) -> str:
    return f"{name}.empty"


class _Opened:
    """A recording that is closed when nothing refers to it any more."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        weakref.finalize(self, recording.close)


class _Recordings(threading.local):
    """The recordings that a thread has open. Consecutive tasks mostly need the same ones.

    Each thread has its own: a recording is not thread-safe, and a dask worker may have several threads.
    """

    def __init__(self) -> None:
        self.cache: SharedCache[_Opened] = SharedCache(max_bytes=_MAX_OPEN)  # counted as one byte each

    def get(self, given: Input, stamp: Stamp) -> _Opened:
        def load() -> _Opened:
            check_unchanged((given, stamp))
            return _Opened(given.open())

        return self.cache.get((given, stamp), load, n_bytes=1)


_OPENED = _Recordings()
