"""Which kind of recording a path is, and the input that reads it."""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.inputs.audio import AudioInput
from penstock.convert.inputs.npz import NpzInput
from penstock.convert.inputs.protocol import Input
from penstock.convert.inputs.shards import ShardsInput
from penstock.convert.inputs.zarr import ZarrInput
from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.core.errors import OptionError, SourceError
from penstock.shard.manifest import MANIFEST
from penstock.source.audio.file import EXTENSIONS, audio_files

__all__ = ["Format", "ReadOptions", "expanded", "inputs_of"]

Format = Literal["auto", "nwb", "npz", "npy", "zarr", "audio", "shards"]

_ZARR = ("zarr.json", ".zgroup", ".zarray")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How recordings are read, of whatever kind they are.

    Parameters
    ----------
    nwb
        How NWB files are cut into windows.
    sequence_length, overlap
        For arrays: rows per sample, and the share of them that the next sample repeats. None: each row is a sample.
    fields
        For npz and zarr: which arrays; None: all.
    axis
        For zarr: along which axis samples lie.
    window_seconds, rate_hz, channels
        For audio: the length of a window, the rate to resample to, and `"mono"` or `"keep"`.
    """

    nwb: NWBOptions = field(default_factory=NWBOptions)
    sequence_length: int | None = None
    overlap: float = 0.0
    fields: tuple[str, ...] | None = None
    axis: int = 0
    window_seconds: float = 1.0
    rate_hz: float | None = None
    channels: Literal["keep", "mono"] = "keep"

    def inputs(self, kind: str, path: Path) -> list[Input]:
        """Return what is read at a path of a known kind."""
        rows = (self.sequence_length, self.overlap)
        made: Mapping[str, Callable[[], Input]] = {
            "nwb": lambda: NWBInput(path, self.nwb),
            "npy": lambda: NpyInput(path, *rows),
            "npz": lambda: NpzInput(path, self.fields, *rows),
            "zarr": lambda: ZarrInput(path, self.fields, self.axis, *rows),
            "shards": lambda: ShardsInput(path),
        }
        if kind != "audio":
            return [made[kind]()]
        files = audio_files(path) if path.is_dir() else [path]
        return [AudioInput(file, self.window_seconds, self.overlap, self.rate_hz, self.channels) for file in files]


def inputs_of(
    paths: Sequence[str | Path],
    format: Format = "auto",  # noqa: A002  # the document's name
    reading: ReadOptions | None = None,
) -> list[Input]:
    """Return the inputs at some paths; patterns such as `data/*.nwb` are expanded, in alphabetical order.

    Examples
    --------
    >>> inputs_of(["nowhere/*.nwb"])
    Traceback (most recent call last):
    ...
    penstock.core.errors.SourceError: Nothing matches nowhere/*.nwb.
    """
    if format not in get_args(Format):
        raise OptionError(f"format={format!r}; use one of {', '.join(get_args(Format))}.")
    reading = reading or ReadOptions()
    found: list[Input] = []
    for path in expanded(paths):
        inputs = reading.inputs(_kind(path) if format == "auto" else format, path)
        if not inputs:
            raise SourceError(f"There are no audio files ({', '.join(EXTENSIONS)}) in {path}.")
        found += inputs
    _check_once(found)
    return found


def expanded(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and patterns stand for, patterns in alphabetical order; none is an error."""
    found: list[Path] = []
    for given in paths:
        text = str(given)
        if Path(text).exists():
            found.append(Path(text))
            continue
        # Not Path.glob, which takes no absolute patterns.
        matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else []  # noqa: PTH207
        if not matches:
            what = f"Nothing matches {text}" if glob.has_magic(text) else f"There is no {text}"
            raise SourceError(f"{what}.")
        found += map(Path, matches)
    return found


def _kind(path: Path) -> str:
    """Return what a path looks like; raise SourceError where that is nothing that can be converted."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    last = suffixes[-1] if suffixes else ""
    if ".nwb" in suffixes:
        return "nwb"
    if path.is_dir():
        return _kind_of_folder(path)
    if last in EXTENSIONS:
        return "audio"
    if suffixes[-2:] == [".zarr", ".zip"]:
        return "zarr"
    if last not in (".npy", ".npz"):
        raise SourceError(
            f"{path} is of no known kind: .nwb, .npz, .npy, .zarr, {', '.join(EXTENSIONS)}. Say what it is with "
            "format= (--format)."
        )
    return last[1:]


def _kind_of_folder(path: Path) -> str:
    if (path / MANIFEST).exists():
        return "shards"
    if path.suffix.lower() == ".zarr" or any((path / name).exists() for name in _ZARR):
        return "zarr"
    if audio_files(path):
        return "audio"
    raise SourceError(
        f"{path} is a folder, but neither a zarr store, nor shards, nor are there audio files in it; name its files, "
        "such as DIR/*.nwb, or say what it is with format= (--format)."
    )


def _check_once(inputs: Sequence[Input]) -> None:
    seen: dict[Any, Input] = {}
    for given in inputs:
        real = given.path.resolve()
        if real in seen:
            raise SourceError(f"{given.path} is given twice; its samples would be in the data set twice.")
        seen[real] = given
