"""Detect the kind of recording at a path, and make the input that reads it."""

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from penstock.convert.inputs.arrays import NpyInput, NpzInput
from penstock.convert.inputs.audio import AudioInput, ClipInput
from penstock.convert.inputs.files import IMAGE_EXTENSIONS, FilesInput, find_files, group_files, has_images
from penstock.convert.inputs.protocol import Input, input_place
from penstock.convert.inputs.source import ShardsInput
from penstock.convert.inputs.zarr import ZarrInput
from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.text import about_unread
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import open_store
from penstock.files.stores.url import Url
from penstock.shard.manifest import MANIFEST
from penstock.source.audio.file import EXTENSIONS, find_audio_files
from penstock.source.stored.folders import HDF5_SUFFIXES
from penstock.source.table.find_parts import TABLE_EXTENSIONS

__all__ = ["Format", "ReadOptions", "detect_kind", "expand_paths", "inputs_of"]

Format = Literal["auto", "nwb", "npz", "npy", "zarr", "audio", "files", "shards"]
"""`"files"`: each file, or each set of files with the same stem, is an item."""

_MAGIC = re.compile(r"[*?[]")
_ZARR = ("zarr.json", ".zgroup", ".zarray")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How recordings are read, for all kinds of input.

    Parameters
    ----------
    nwb
        How NWB files are cut into windows.
    sequence_length, overlap
        For arrays: rows per item, and the fraction of them that the next item repeats. None: each row is an item.
    fields
        For npz and zarr: names of the arrays to convert; None: all.
    axis
        For zarr: the axis along which items lie.
    window_seconds, rate_hz, channels
        For audio: the length of a window, the rate to resample to, and whether to mix (`"mono"`) or `"keep"` channels.
    clips, clip_seconds, min_seconds
        For audio: whether each file is one item instead of windows, the length that clips are cropped or padded to
        (None: their own), and the length below which a file is skipped (None: no file is).
    store, cache, cache_bytes
        For URLs: how they are reached (None: as the output, or by the environment), a folder that keeps what was
        downloaded, and what it may hold.
    """

    nwb: NWBOptions = field(default_factory=NWBOptions)
    sequence_length: int | None = None
    overlap: float = 0.0
    fields: tuple[str, ...] | None = None
    axis: int = 0
    window_seconds: float = 1.0
    rate_hz: float | None = None
    channels: Literal["keep", "mono"] = "keep"
    clips: bool = False
    clip_seconds: float | None = None
    min_seconds: float | None = None
    store: StoreOptions | None = None
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.clip_seconds is not None and not self.clips:
            raise OptionError(
                f"clip_seconds needs clips=True, got clip_seconds={self.clip_seconds}. The length of windows "
                "is window_seconds."
            )

    def remote(self, places: Sequence[Path | Url], store: StoreOptions | None = None) -> RemoteOptions | None:
        """Return how URLs among the inputs are reached, by default by `store`; None if there are none."""
        place = next((place for place in places if isinstance(place, Url)), None)
        if place is not None:
            return RemoteOptions.parse(place, self.store or store, self.cache, self.cache_bytes)
        given = {"store": self.store, "cache": self.cache, "cache_bytes": self.cache_bytes}
        for name in (name for name, value in given.items() if value is not None):
            raise OptionError(f"{name} must be left out: it is for URLs, and none of the inputs is one.")
        return None

    def inputs(self, kind: str, path: Path | Url, remote: RemoteOptions | None = None) -> list[Input]:
        """Return the inputs at a path of a known kind."""
        rows = (self.sequence_length, self.overlap)
        remote = remote if isinstance(path, Url) else None
        makers: Mapping[str, Callable[[], Input]] = {
            "nwb": lambda: NWBInput(path, self.nwb, remote=remote),
            "npy": lambda: NpyInput(path, *rows, remote=remote),
            "npz": lambda: NpzInput(path, self.fields, *rows, remote=remote),
            "zarr": lambda: ZarrInput(path, self.fields, self.axis, *rows, remote=remote),
            "shards": lambda: ShardsInput(path, remote),
        }
        if kind != "audio":
            return [makers[kind]()]
        files = find_audio_files(path) if isinstance(path, Path) and path.is_dir() else [path]
        return [self._audio_input(file, remote) for file in files]

    def _audio_input(self, path: Path | Url, remote: RemoteOptions | None) -> Input:
        rate = (self.rate_hz, self.channels)
        if self.clips:
            return ClipInput(path, self.clip_seconds, self.min_seconds, *rate, remote=remote)
        return AudioInput(path, self.window_seconds, self.overlap, *rate, self.min_seconds, remote)


def inputs_of(
    paths: Sequence[str | os.PathLike[str] | Url],
    format: Format = "auto",  # noqa: A002  # a public name
    reading: ReadOptions | None = None,
    store: StoreOptions | None = None,
) -> list[Input]:
    """Return the inputs at the given paths and URLs. Patterns such as `data/*.nwb` are expanded in alphabetical order.

    Parameters
    ----------
    store
        How URLs are reached, unless `reading` says so.

    Examples
    --------
    >>> inputs_of(["nowhere/*.nwb"])
    Traceback (most recent call last):
    ...
    penstock.core.errors.SourceError: No file matches nowhere/*.nwb.
    """
    if format not in get_args(Format):
        raise OptionError(f"format must be one of {', '.join(map(repr, get_args(Format)))}, got {format!r}.")
    reading = reading or ReadOptions()
    found: list[Input] = []
    whole: list[tuple[Path, Path | None]] = []
    remote = reading.remote([input_place(path) for path in paths], store)
    for path in expand_paths(paths, None if remote is None else remote.store):
        kind = _find_kind(path, remote) if format == "auto" else format
        if kind == "files" and isinstance(path, Url):
            found.append(FilesInput(path, remote=remote))
            continue
        if kind == "files" and isinstance(path, Path):
            whole += [(file, path) for file in find_files(path)] if path.is_dir() else [(path, None)]
            continue
        inputs = reading.inputs(kind, path, remote)
        if not inputs:
            raise SourceError(f"No audio files ({', '.join(EXTENSIONS)}) in {path}.")
        found += inputs
    if format == "files" and not whole and not found:
        raise SourceError(f"No files in {', '.join(map(str, paths))}.")
    found += group_files(whole)
    _check_unique(found)
    return found


def _find_kind(path: Path | Url, remote: RemoteOptions | None) -> str:
    """Return the kind of recording at a path or URL; a URL without a known extension may be a folder of shards."""
    if isinstance(path, Url) and not PurePosixPath(path.name).suffix:
        store = open_store(path, None if remote is None else remote.store)
        for name, kind in ((MANIFEST, "shards"), *((name, "zarr") for name in _ZARR)):
            with suppress(MissingObjectError):
                store.describe(name)
                return kind
    return detect_kind(path)


def detect_kind(path: Path | Url) -> str:
    """Return the kind of recording at a path; raise SourceError if it is none that can be converted."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path.name).suffixes]
    last = suffixes[-1] if suffixes else ""
    if ".nwb" in suffixes:
        return "nwb"
    if isinstance(path, Path) and path.is_dir():
        return _detect_folder_kind(path)
    if last in EXTENSIONS:
        return "audio"
    if last in IMAGE_EXTENSIONS:
        return "files"
    if suffixes[-2:] == [".zarr", ".zip"] or (isinstance(path, Url) and last == ".zarr"):
        return "zarr"
    if last in (".npy", ".npz"):
        return last[1:]
    if last in (*TABLE_EXTENSIONS, *HDF5_SUFFIXES):
        raise SourceError(
            f"{path} needs no conversion: penstock.open({str(path)!r}) reads it where it is. With format='files', "
            "whole files are items."
        )
    if last:
        raise SourceError(f"{about_unread(path)} With format='files', whole files are items as they are.")
    raise SourceError(
        "The format of an input must be known from its name (.nwb, .npz, .npy, .zarr, "
        f"{', '.join(EXTENSIONS)}, images), got {path}. Give it, such as format='npy'. With format='files', any files "
        "are items as they are."
    )


def _detect_folder_kind(path: Path) -> str:
    if (path / MANIFEST).exists():
        return "shards"
    if path.suffix.lower() == ".zarr" or any((path / name).exists() for name in _ZARR):
        return "zarr"
    if find_audio_files(path):
        return "audio"
    if has_images(path):
        return "files"
    raise SourceError(
        f"An input folder must be a zarr store or contain shards, audio files or images, got {path}. Name its files, "
        "such as DIR/*.nwb, or give the format, such as format='zarr'. With format='files', whole files are items. For "
        "any other, write a function of five lines (docs/how-to/convert-recordings.md)."
    )


def _check_unique(inputs: Sequence[Input]) -> None:
    seen: dict[Any, Input] = {}
    for given in inputs:
        real = given.path.resolve() if isinstance(given.path, Path) else given.path
        if real in seen:
            raise SourceError(
                f"Every input must be given once, got {given.path} twice. Its items would be in the dataset twice."
            )
        seen[real] = given


def expand_paths(paths: Sequence[str | os.PathLike[str] | Url], store: StoreOptions | None = None) -> list[Path | Url]:
    """Return the files that paths and patterns stand for, each pattern in alphabetical order; no match is an error."""
    found: list[Path | Url] = []
    for given in paths:
        place = input_place(given)
        if isinstance(place, Url):
            found += _expand_url(place, store)
            continue
        text = str(place)
        if place.exists():
            found.append(place)
            continue
        # Not Path.glob, which does not take absolute patterns.
        matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else []  # noqa: PTH207
        if not matches:
            is_pattern = glob.has_magic(text)
            raise SourceError(f"No file matches {text}." if is_pattern else f"No such file or folder: {text}.")
        found += map(Path, matches)
    return found


def _expand_url(url: Url, store: StoreOptions | None) -> list[Url]:
    """Return the objects that match a pattern such as `s3://bucket/raw/**/*.nwb`."""
    if not _MAGIC.search(url.path):
        return [url]
    parts = url.path.split("/")
    n_fixed = next(number for number, part in enumerate(parts) if _MAGIC.search(part))
    folder = Url(url.root)
    for part in parts[:n_fixed]:
        folder /= part
    matches = _compile(parts[n_fixed:])
    try:
        names = [info.key for info in open_store(folder, store).list_objects()]
    except ReadError as error:
        if not url.is_http:
            raise
        raise SourceError(
            f"The web server does not list its files, got the pattern {url}: {error} Name each file."
        ) from error
    found = sorted({match[0] for name in names if (match := matches.match(name)) is not None})
    if not found:
        raise SourceError(f"No object matches {url}.")
    return [folder / name for name in found]


def _compile(parts: Sequence[str]) -> re.Pattern[str]:
    """Return what matches a name, or the folder that it is in: a zarr store is a folder of objects.

    Examples
    --------
    >>> [bool(_compile(["**", "*.nwb"]).match(name)) for name in ("a.nwb", "x/y/a.nwb", "x/.b.nwb", "a.nwb.txt")]
    [True, True, False, False]
    """
    texts = []
    for part in parts:
        if part == "**":
            texts.append(r"(?:(?!\.)[^/]+/)*")
        else:
            plain = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
            hidden = "" if part.startswith(".") else r"(?!\.)"
            texts.append(f"{hidden}{plain.replace('.*', '[^/]*')}/")
    return re.compile("".join(texts).removesuffix("/") + r"(?=/|\Z)")
