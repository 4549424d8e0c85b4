"""What is fuzzed: a parser, inputs that it accepts, how to change them, and what may come of it."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.campaign.fuzz.mutate import Mutation

__all__ = [
    "HARNESS",
    "SkippedInput",
    "Target",
    "WrongValueError",
    "clear_folder",
    "copy_folder",
    "put_file",
    "select_file",
]


class SkippedInput(Exception):  # noqa: N818  # no error: the input says nothing about the parser
    """An input that the harness itself cannot give to the parser, such as text for a parser of JSON values."""


class WrongValueError(Exception):
    """The parser returned a value that differs from the one that the input holds."""


Run = Callable[[bytes], Any]


class _Harness:
    """Whether the harness itself is writing, which is no finding; use as a context."""

    is_writing = False

    def __enter__(self) -> None:
        self.is_writing = True

    def __exit__(self, *_: object) -> None:
        self.is_writing = False


HARNESS = _Harness()


def put_file(path: Path, content: bytes) -> None:
    """Write the input, or a part of it, to where the parser reads it."""
    with HARNESS:
        path.write_bytes(content)


def read_file(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Run]:
    """Return what makes a run that writes an input as a file of this name and reads it."""

    def prepare(folder: Path) -> Run:
        def run(content: bytes) -> None:
            put_file(folder / name, content)
            read(folder / name)

        return run

    return prepare


def clear_folder(folder: Path) -> None:
    """Remove what an input before has left."""
    with HARNESS:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder of files that an input replaces one of."""
    with HARNESS:
        shutil.copytree(source, target)


@dataclass(frozen=True)
class Target:
    """One parser.

    Parameters
    ----------
    name
        Also the folder of its files in `tests/corpus`.
    prepare
        Called once in each process with an empty folder; returns the function that parses one input. It raises
        WrongValueError if it can tell that the value is wrong.
    seeds
        Returns inputs that the parser accepts, of every kind that it knows.
    errors
        The errors that the parser may raise. Any other is a finding.
    weight
        Its share of the inputs, relative to others: 1 for parsers that take a fraction of a millisecond.
    """

    name: str
    prepare: Callable[[Path], Run]
    seeds: Callable[[], Sequence[bytes]]
    errors: tuple[type[Exception], ...]
    mutations: tuple[Mutation, ...] = ()
    tokens: tuple[bytes, ...] = ()
    weight: float = 1.0
    writes: tuple[str, ...] = ()
    """Patterns of file names that the parser may write in its folder."""

    warnings: tuple[str, ...] = ()
    """Beginnings of the warnings that it may give."""

    is_heavy: bool = False
    """Whether its imports take seconds; the short form in `make test` leaves it out."""


def select_file(mutation: Mutation) -> Mutation:
    """Return a mutation of the content of inputs of the form NAME, newline, content."""

    def mutate_content(content: bytes, rng: random.Random) -> bytes:
        name, newline, rest = content.partition(b"\n")
        return name + newline + mutation(rest, rng)

    return mutate_content
