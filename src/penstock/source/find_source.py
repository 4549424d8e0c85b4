"""From anything that holds items to a source: a path, a pattern, a URL, arrays or a dataset. Its kind is found out."""

import glob
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Source
from penstock.core.text import cause, count, did_you_mean
from penstock.files.staging import describe_unfinished
from penstock.files.stores.url import is_url, parse_place
from penstock.shard.manifest import MANIFEST
from penstock.shard.places.archives import ARCHIVE
from penstock.shard.places.missing import INDEXED
from penstock.source.array import ArraySource, refuse_foreign
from penstock.source.audio.file import EXTENSIONS
from penstock.source.audio.source import AudioSource
from penstock.source.combine import Concat
from penstock.source.dataset import DatasetSource
from penstock.source.files.folder import FolderSource
from penstock.source.files.reader import EXTENSIONS as FILE_EXTENSIONS
from penstock.source.numpy_files import NumpySource
from penstock.source.stored.folders import HDF5_SUFFIXES, Folders
from penstock.source.stored.npy import map_npy
from penstock.source.stored.source import ZarrSource
from penstock.source.table.find_parts import TABLE_EXTENSIONS
from penstock.source.table.source import TableSource
from penstock.source.tar.source import TarSource
from penstock.source.volume.array import VolumeArray
from penstock.source.volume.attributes import read_ome
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeSource

__all__ = ["open_source", "pass_options"]

_T = TypeVar("_T")

_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
_TABLE_PACKAGES = ("pandas", "polars", "pyarrow", "datasets")
_IMAGES = tuple(f".{each}" for each in FILE_EXTENSIONS["image"])
_USE_FUNCTION = "Give a function that reads one, penstock.FolderSource('{}', decode=function): each file is an item"
_PROTOCOL = ("index", "fields", "read", "take")


def open_source(what: Any, **options: Any) -> Source:
    """Return a source for anything that has items.

    | what | source |
    |---|---|
    | a folder or a URL of shards; a pattern of tars that were indexed | `TarSource` |
    | a zarr array or group, or a URL of one; a dataset in an HDF5 file (`"day.h5/x"`), or with `fields=` several | \
`ZarrSource` |
    | an OME-NGFF image, with `shape=` of a patch, and perhaps `scale=` and `at=` | `VolumeSource` |
    | an audio file, a pattern (`"*.wav"`), or a folder of audio files | `AudioSource` |
    | an npy file, or a pattern of them | `ArraySource`, concatenated |
    | an npz archive; an npy file at a URL | `NumpySource` |
    | a list of paths of one of these kinds | concatenated |
    | a `.parquet`, `.feather`, `.arrow`, `.csv` or `.tsv` file, a pattern or a folder of them; a frame of pandas or \
polars, a pyarrow table, a Hugging Face dataset | `TableSource` |
    | a pattern of images, or a folder with a folder of images for each class | `FolderSource` |
    | an array, or a mapping of names to arrays | `ArraySource` |
    | a source | itself |
    | any other object with `len` and `[i]`, such as a torch dataset | `DatasetSource` |

    Parameters
    ----------
    options
        Those of the source that it is, such as `fields=["x"]` or `cache="/scratch"`.

    Examples
    --------
    >>> import numpy as np
    >>> open_source({"x": np.arange(3)}), open_source([("a", 1), ("b", 2)])
    (ArraySource(3 items of x), DatasetSource(list))
    >>> open_source("nowhere.npy")
    Traceback (most recent call last):
    ...
    penstock.core.errors.SourceError: nowhere.npy does not exist.
    """
    if isinstance(what, str | os.PathLike) or is_url(what):
        return _open_place(os.fspath(what) if isinstance(what, os.PathLike) else str(what), options)
    if isinstance(what, Sequence) and what and all(isinstance(each, str | os.PathLike) for each in what):
        return _open_files([os.fspath(each) for each in what], options)
    if all(hasattr(what, name) for name in _PROTOCOL):
        source: Source = pass_options(lambda: what, options)
        return source
    kind, given = _find_kind(what)
    return pass_options(kind, options, given)


def _find_kind(what: Any) -> tuple[Callable[..., Source], Any]:
    """Return the source of an object in memory, and what it is made from."""
    if type(what).__module__.partition(".")[0] in _TABLE_PACKAGES:
        return TableSource, what
    refuse_foreign(what)
    if isinstance(what, Mapping):
        return ArraySource, what
    if hasattr(what, "shape") and hasattr(what, "dtype") and hasattr(what, "__array__"):
        return ArraySource, {"x": what}
    if hasattr(what, "__getitem__") and hasattr(what, "__len__") and not isinstance(what, bytes | bytearray):
        return DatasetSource, what
    raise SourceError(
        f"Items come from a path, a URL, arrays, a dataset with len() and [i], or a source, got {type(what).__name__}. "
        "Convert an iterable dataset to shards first."
    )


def _open_place(where: str, options: dict[str, Any]) -> Source:
    """Return the source of a path, a pattern or a URL."""
    is_remote = is_url(where)
    where = str(parse_place(where)) if is_remote else where
    path, suffix = Path(where), Path(where).suffix.lower()
    is_group = not is_remote and any((path / name).is_file() for name in _ZARR_FILES)
    if is_group or any(_names_store(part) for part in path.parts):
        first = next((n for n, part in enumerate(path.parts, 1) if _names_store(part)), len(path.parts))
        if not is_remote and not Path(*path.parts[:first]).exists():
            raise _make_missing_error(Path(*path.parts[:first]))
        return _open_zarr(where, options)
    if not is_remote and not glob.has_magic(where) and "{" not in where and not path.exists():
        raise _make_missing_error(path)
    if suffix == ".npz" or (is_remote and suffix == ".npy"):
        return pass_options(NumpySource, options, where)
    if suffix in (".npy", *EXTENSIONS) and not is_remote:
        is_pattern = glob.has_magic(where) and not path.exists()
        found = sorted(glob.glob(where, recursive=True)) if is_pattern else [where]  # noqa: PTH207  # a whole pattern
        if not found:
            raise SourceError(f"No file {where}. Check the pattern.")
        return _open_files(found, options)
    if is_remote and suffix in (*EXTENSIONS, *TABLE_EXTENSIONS, *_IMAGES):
        raise SourceError(
            f"At a URL, shards, zarr, HDF5, npy and npz can be opened, got {where}. Copy it to this machine, or make "
            "shards of it with convert_to_shards, which reads audio, NWB and whole files at URLs."
        )
    inside = set() if is_remote else _list_extensions(path)
    is_table = suffix in TABLE_EXTENSIONS or bool(inside & set(TABLE_EXTENSIONS))
    if is_table or inside & set(EXTENSIONS):
        kind: Callable[..., Source] = TableSource if is_table else AudioSource
        return pass_options(kind, options, where)
    if not is_remote and (suffix in _IMAGES or ("" in inside and _has_images(path))):
        return pass_options(FolderSource, options, where)
    if not is_remote:
        _refuse_other_files(path, inside)
        _refuse_unread(path)
    return pass_options(TarSource, options, where)


def _names_store(part: str) -> bool:
    """Return whether a part of a path has the name of a zarr store or an HDF5 file."""
    return Path(part).suffix.lower() in HDF5_SUFFIXES or ".zarr" in Path(part).suffixes


def _refuse_other_files(path: Path, inside: set[str]) -> None:
    """Raise SourceError, which says what to open instead, for a path of this machine that has no shards."""
    loose = sorted(inside & {".npy", *_IMAGES})
    if loose:
        raise SourceError(f"{path} has no shards. Open its {loose[0]} files by a pattern, '{path}/*{loose[0]}'.")
    kind = path.suffix.lower()
    is_indexed = Path(f"{path}{INDEXED}").is_file()
    if kind == ".tar" and not is_indexed and (path.parent / MANIFEST).is_file():
        raise SourceError(
            f"{path} is a part of the dataset '{path.parent}'. Open that, and choose items by where(...)."
        )
    if kind not in (".tar", ".json") and path.is_file():
        raise SourceError(
            f"{path} is no file that can be read item by item: shards, zarr, HDF5, npy, audio, images and tables are. "
            f"{_USE_FUNCTION.format(path)}. Or read it in Python, and open arrays or a list of items."
        )


def _refuse_unread(path: Path) -> None:
    """Raise SourceError for a folder or a pattern with files of a kind that is not read, and no archives."""
    if (path / MANIFEST).exists():
        return
    files = list(path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207  # a whole pattern
    kinds = Counter(entry.suffix.lower() for entry in files if entry.is_file() and not entry.name.startswith("."))
    if any(ARCHIVE.search(entry.name) for entry in files) or not kinds or describe_unfinished(path):
        return
    kind, number = kinds.most_common(1)[0]
    if kind not in ("", ".json", ".jsonl", ".npz", *HDF5_SUFFIXES):
        pattern = path / f"*{kind}" if path.is_dir() else path
        raise SourceError(
            f"{path} has no shards, but {count(number, f'{kind} file')}, which are not read. "
            f"{_USE_FUNCTION.format(pattern)}."
        )


def _make_missing_error(path: Path) -> SourceError:
    """Return the error for a path of this machine with nothing there; it names what is near."""
    there = next((folder for folder in path.parents if folder.is_dir()), Path())
    missing = path.parts[len(there.parts)] if path.parts else ""
    try:
        near = get_close_matches(missing, [entry.name for entry in there.iterdir()], n=1)
    except OSError:  # a folder that must not be listed
        near = []
    return SourceError(f"{path} does not exist.{f' Did you mean {there / near[0]}?' if near else ''}")


def _has_images(folder: Path) -> bool:
    """Return whether a folder has folders of images, one for each class."""
    return any(entry.suffix.lower() in _IMAGES for entry in folder.glob("*/*"))


def _list_extensions(folder: Path) -> set[str]:
    """Return the extensions of the files in a folder that has no shards."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return set()
    found = {entry.suffix.lower() for entry in folder.iterdir()}
    return set() if ".tar" in found else found


def _open_files(paths: list[str], options: dict[str, Any]) -> Source:
    """Return the source of several files of one kind: audio, tables, or npy, one after the other."""
    kinds = {Path(path).suffix.lower() for path in paths}
    if kinds <= set(TABLE_EXTENSIONS):
        return pass_options(TableSource, options, paths)
    if kinds <= set(EXTENSIONS):
        return pass_options(AudioSource, options, paths)
    if len(kinds) > 1:
        raise SourceError(
            f"Files must be of one kind, such as audio, tables or npy, got {', '.join(sorted(kinds))} files."
        )
    if kinds != {".npy"}:
        found = [_open_place(path, options) for path in paths]
        if any(isinstance(source, FolderSource) for source in found):
            raise SourceError(
                f"Images in a list, such as {paths[0]}, have no classes in common: open one pattern or folder, or a "
                "table of paths and labels with FilesSource."
            )
        return Concat(found)
    name = Path(paths[0]).stem or "x" if len(paths) == 1 else "x"
    parts = [pass_options(ArraySource, options, {name: _map_npy(path)}) for path in paths]
    return parts[0] if len(parts) == 1 else Concat(parts)


def _map_npy(path: str) -> Any:
    try:
        return map_npy(Path(path))
    except FileNotFoundError as error:
        raise _make_missing_error(Path(path)) from error
    except OSError as error:
        raise SourceError(f"Could not read {path} as an npy file: {cause(error)}") from error


def _open_zarr(where: str, options: dict[str, Any]) -> Source:
    """Return the patches of an OME-NGFF image, or the rows of arrays."""
    remote: Any = {name: options[name] for name in ("store", "cache", "cache_bytes") if name in options}
    is_hdf5 = any(Path(part).suffix.lower() in HDF5_SUFFIXES for part in Path(where).parts)
    is_there = is_url(where) or Path(where).is_dir()
    if is_hdf5 or not is_there or "multiscales" not in read_ome(Folders.open_one(where, remote)):
        return pass_options(ZarrSource, options, where)
    rest = dict(options)
    shape, scale = rest.pop("shape", None), rest.pop("scale", None)
    image = Multiscale.read(where, **remote)
    if shape is None:
        raise SourceError(
            f"{where} is an OME-NGFF image with {len(image.levels)} levels, whose items are patches. Say how large they"
            " are, in voxels, such as shape=(64, 64, 64), and perhaps at which scale=(...) in world units."
        )
    if scale is None:
        by_axis = dict(zip((axis.name for axis in image.axes), image.levels[0].scale, strict=True))
        order = [name for name in rest.get("axis_order", "zyx") if name in by_axis]
        scale = [by_axis[name] for name in order][-len(shape) :]
    return pass_options(VolumeSource, rest, {"image": VolumeArray(where, shape, scale)})


def pass_options(kind: Callable[..., _T], options: Mapping[str, Any], *arguments: Any, **own: Any) -> _T:
    """Return what `kind` makes; raise OptionError for options that it does not take, or that the caller sets."""
    known = [name for name in list(inspect.signature(kind).parameters)[len(arguments) :] if name not in own]
    unknown = sorted(set(options) - set(known))
    if unknown:
        name = getattr(kind, "__name__", "")
        hint = did_you_mean(unknown[0], known)
        takes = f"{name} takes {', '.join(known)}" if known else "a source that is open takes none"
        raise OptionError(f"Options must be known: {takes}; got {', '.join(unknown)}.{hint}")
    return kind(*arguments, **options, **own)
