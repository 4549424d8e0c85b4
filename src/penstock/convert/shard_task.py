"""The unit of a conversion: one shard, written by whoever is asked to, from nothing but its task.

A task says which samples of which inputs make up a shard. Two processes that are given the same task write the same
bytes, so that it does not matter who does it, when, or how often.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.fingerprint import Stamp, read_stamp
from penstock.convert.inputs.protocol import Input, Recording, Sample
from penstock.core.errors import OptionError, PenstockError, ReadError, WriteError
from penstock.files.durable import write_aside
from penstock.shard.names import automatic_key
from penstock.shard.sample_form import SampleForm
from penstock.shard.shard_file import ShardFile
from penstock.shard.writer import WriteOptions
from penstock.transform.moments import Moments

__all__ = ["InputError", "Task", "close_recordings", "statistics_of", "write_task"]

_KEPT_OPEN = 4
_TOGETHER = 32  # samples whose statistics are worked out at once


class InputError(ReadError):
    """An input that could not be read, or was written to meanwhile."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return type(self), (self.path, self.reason)


@dataclass(frozen=True, slots=True)
class Task:
    """What one shard is made of."""

    writing: Path
    """The folder where it is written."""

    number: int
    """Of the shard."""

    first: int
    """The number of its first sample in the data set."""

    options: WriteOptions
    inputs: tuple[Input, ...]
    stamps: tuple[Stamp, ...]
    """How the inputs were when they were counted."""

    which: NDArray[np.int64]
    """The input of each sample."""

    samples: NDArray[np.int64]
    """The number of each sample in its input."""

    statistics: bool = False
    """Whether mean and deviation are worked out along the way."""

    @property
    def name(self) -> str:
        """The file name of the shard."""
        return self.options.shard_name(self.number)

    def __str__(self) -> str:
        return f"{self.name}, made of {', '.join(str(given.path) for given in self.inputs)}"


def write_task(task: Task) -> int:
    """Write one shard, and return how many samples are in it."""
    form, statistics = SampleForm(task.options.array_format), _Statistics()
    shard: ShardFile | None = None
    try:
        shard = ShardFile(task.writing, task.name, task.options.compression)
        for offset, (sample, about) in enumerate(_samples(task)):
            payloads = form.encode(sample, task.first + offset)
            key = automatic_key(task.first + offset)
            form.make_members(key, key, payloads, about).add_to(shard, task.number)
            form.learn(payloads)
            if task.statistics:
                statistics.add(sample)
            _check_size(shard, task.options)
        if task.statistics:
            write_aside(_statistics_path(task.writing, task.name), statistics.to_bytes(), lasting=False)
        entry, _ = shard.close()
    except BaseException as error:
        if shard is not None:
            shard.discard()
        if isinstance(error, OSError) and not isinstance(error, PenstockError):
            raise WriteError(f"Could not write {task.name} in {task.writing}: {error}.") from error
        raise
    return entry.n_items


def statistics_of(writing: Path, name: str) -> dict[str, Moments]:
    """Return what was worked out while a shard was written."""
    stored = json.loads(_statistics_path(writing, name).read_bytes())
    return {field: Moments.from_json(moment) for field, moment in stored.items()}


def close_recordings() -> None:
    """Close what tasks have left open in this thread, for others that follow."""
    _RECORDINGS.close()


def _samples(task: Task) -> Iterator[Sample]:
    """Yield the samples of a shard; whatever goes wrong with an input names it."""
    borders = (np.flatnonzero(np.diff(task.which)) + 1).tolist()
    for start, stop in zip([0, *borders], [*borders, len(task.which)], strict=True):
        number = int(task.which[start])
        given, stamp = task.inputs[number], task.stamps[number]
        try:
            yield from _RECORDINGS.get(given, stamp).samples(task.samples[start:stop])
            _check_unchanged(given, stamp)
        except InputError:
            raise
        except (PenstockError, OSError) as error:
            raise InputError(given.path, str(error)) from error
        except Exception as error:
            error.add_note(f"[penstock] while converting {given.path}")
            raise


class _Statistics:
    """Mean and deviation of the fields of a shard; samples of one shape are taken together, which is much faster."""

    def __init__(self) -> None:
        self._moments: dict[str, Moments] = {}
        self._waiting: dict[str, list[NDArray[Any]]] = {}

    def add(self, sample: dict[str, Any]) -> None:
        for name, value in sample.items():
            array = np.asarray(value)
            if array.dtype.kind not in "fiu":
                continue
            waiting = self._waiting.setdefault(name, [])
            if waiting and (len(waiting) == _TOGETHER or waiting[0].shape != array.shape):
                self._take(name)
            self._waiting[name].append(array)

    def _take(self, name: str) -> None:
        self._moments.setdefault(name, Moments()).update(np.stack(self._waiting[name]))
        self._waiting[name] = []

    def to_bytes(self) -> bytes:
        for name in self._waiting:
            self._take(name)
        return json.dumps({name: moments.to_json() for name, moments in self._moments.items()}).encode()


def _check_size(shard: ShardFile, options: WriteOptions) -> None:
    limit = options.most_tar_bytes
    if limit is not None and shard.tar_bytes > limit:
        raise OptionError(
            f"A shard of {options.shard_size} samples takes more than {limit} bytes, the most that one with "
            f"compression={options.compression!r} may have; use a smaller shard_size."
        )


def _check_unchanged(given: Input, stamp: Stamp) -> None:
    if read_stamp(given.path) != stamp:
        raise InputError(given.path, "it was written to while it was converted; wait until it is complete")


def _statistics_path(writing: Path, name: str) -> Path:
    return writing / f"{name}.statistics"


class _Recordings(threading.local):
    """The inputs that a thread has open; tasks that follow each other mostly need the same ones.

    Each thread has its own, since recordings are for one at a time, and a worker of a dask cluster may have several.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Input, Stamp], Recording] = OrderedDict()

    def get(self, given: Input, stamp: Stamp) -> Recording:
        key = (given, stamp)
        if key not in self._open:
            _check_unchanged(given, stamp)
            while len(self._open) >= _KEPT_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[key] = given.open()
        self._open.move_to_end(key)
        return self._open[key]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


_RECORDINGS = _Recordings()
