"""Inputs that fail on purpose, and the results of a conversion.

What happens to an input lies in a file beside it, not in the input: a run that was disturbed and one that was not have
the same inputs, so that their results can be compared byte by byte.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import TarSource
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.inputs.protocol import Recording, Sample
from penstock.core.errors import ReadError

Row = tuple[str, int, list[float]]
"""File, row and values of an item."""


class OddError(Exception):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, what: str, *, why: str) -> None:
        super().__init__(f"{what}: {why}")

    def __reduce__(self) -> Any:  # as Python does it; dask has a way of its own for errors that do not say how
        return OddError, self.args


@dataclass(frozen=True)
class Taped:
    """A `.npy` file of the subject in its name (`anna_1.npy`), with the failures that `mishap` has planned."""

    path: Path
    sequence_length: int | None = None
    overlap: float = 0.0

    def open(self) -> "_Tape":
        return _Tape(self.path, NpyInput(self.path, self.sequence_length, self.overlap).open())


class _Tape:
    def __init__(self, path: Path, recording: Recording) -> None:
        self._path, self._recording = path, recording
        self.n_samples, self.about = recording.n_samples, recording.about
        self.groups = {"subject": path.stem.partition("_")[0]}
        self.notes = (*recording.notes, f"{path.stem} was taped")
        self.span, self.close = recording.span, recording.close

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        for number, (fields, about) in zip(numbers.tolist(), self._recording.samples(numbers), strict=True):
            yield self._after_mishap(number, fields), about

    def _after_mishap(self, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            stored = json.loads(_mishap_path(self._path).read_bytes())
        except FileNotFoundError:
            return fields
        if number != stored["at"]:
            return fields
        if stored["once"]:
            _mishap_path(self._path).unlink()
        return _befall(stored["kind"], self._path, fields)


def _befall(kind: str, path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case "read":
            raise ReadError(f"the tape of {path.stem} is torn")
        case "value":
            raise ValueError(f"{path.stem} has its own ideas")
        case "odd":
            raise OddError(path.stem, why="cannot travel")
        case "interrupt":
            raise KeyboardInterrupt
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "grow":
            content = np.load(path)
            np.save(path, np.concatenate([content, content[:1]]))
        case "rewrite":
            content = path.read_bytes()
            path.write_bytes(content[:-4] + b"\0\0\0\0")
            os.utime(path, ns=(1, 1))
        case "hold":  # until somebody ends this process, or the test is over
            _held_path(path).touch()
            while _held_path(path).exists():
                time.sleep(0.005)
        case "dtype":
            return {name: value.astype(np.float64) for name, value in fields.items()}
        case "field":
            return {**fields, "more": np.zeros(1)}
    return fields


def _mishap_path(path: Path) -> Path:
    return path.with_suffix(".mishap")


def _held_path(path: Path) -> Path:
    return path.with_suffix(".held")


def held(path: Path) -> bool:
    """Return whether a process is waiting at an item that holds it."""
    return _held_path(path).exists()


def mishap(given: Taped, kind: str, at: int, *, once: bool = True) -> None:
    """Make something happen when item `at` is read, once or each time."""
    _mishap_path(given.path).write_text(json.dumps({"kind": kind, "at": at, "once": once}))


def has_happened(given: Taped) -> bool:
    """Return whether a mishap that happens once has happened."""
    return not _mishap_path(given.path).exists()


def mend(given: Taped) -> None:
    _mishap_path(given.path).unlink(missing_ok=True)
    _held_path(given.path).unlink(missing_ok=True)


def tapes(folder: Path, sizes: Sequence[int] = (7, 5, 9), names: Sequence[str] = (), **options: Any) -> list[Taped]:
    """Write files whose values are their positions: row r of input k is (100 k + r, k, -r)."""
    folder.mkdir(exist_ok=True)
    found = []
    for number, size in enumerate(sizes):
        path = folder / (f"{names[number]}.npy" if names else f"tape_{number}.npy")
        np.save(path, np.array([values(number, row) for row in range(size)], np.float32))
        found.append(Taped(path, **options))
    return found


def values(number: int, row: int) -> list[float]:
    return [100 * number + row, number, -row]


def rows(given: Sequence[Taped], numbers: Sequence[int] | None = None) -> list[Row]:
    """Return every row of inputs, in order, as it is read from the files."""
    chosen = range(len(given)) if numbers is None else numbers
    return [
        (given[number].path.name, row, found)
        for number in chosen
        for row, found in enumerate(np.load(given[number].path).tolist())
    ]


def read(folder: Path) -> list[Row]:
    """Return every item of a dataset, in order."""
    source = TarSource(folder)
    block = source.take(np.arange(len(source.index)))
    source.close()
    return [
        (about["file"], about["row"], values)
        for about, values in zip(block["metadata"], block["data"].tolist(), strict=True)
    ]


def add_up(item: dict[str, Any]) -> Any:
    """Return a field computed from the field `x` of an item."""
    return item["x"].sum()


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(folder: Path) -> set[str]:
    """Return the files that a reader sees: all but those in hidden folders."""
    return {name for name in tree(folder) if not any(part.startswith(".") for part in Path(name).parts)}
