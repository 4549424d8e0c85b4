"""Whole files as items: images, arrays and texts, alone or as the files that share a stem (`a.png` and `a.txt`)."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample, check_numbers, folder_name, input_place
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.byte_files import open_bytes
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.decoders.decode import decode
from penstock.shard.decoders.images import IMAGES
from penstock.shard.names import check_fields
from penstock.source.audio.file import EXTENSIONS

__all__ = ["IMAGE_EXTENSIONS", "FilesInput", "find_files", "group_files", "has_images"]

IMAGE_EXTENSIONS = tuple(f".{extension}" for extension in IMAGES)
_ARRAYS = (".npy", ".npz")
_MAIN_KINDS = (IMAGE_EXTENSIONS, EXTENSIONS, _ARRAYS)
_SAME = {"jpeg": "jpg", "jpe": "jpg", "tiff": "tif"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_OF_SYSTEMS = ("thumbs.db", "desktop.ini")
_LONGEST = 6  # with its dot: longer words before `.gz` are parts of a name
_MOST_LINES = 20
_LOG = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class FilesInput:
    """One item: a file, and perhaps others in the same folder.

    A `.npy` file is the field `data`, and each array of a `.npz` file a field of its own name. Any other file is stored
    as it is, under its extension: an image as `png` or `jpg`, a text as `txt`. A number in a `.cls` file is an integer.

    Parameters
    ----------
    files
        Field and file name of each file; None: only the file at `path`, with its extension as the field.
    class_name
        The class of the item, in the metadata as `class`.
    """

    path: Path | Url
    files: tuple[tuple[str, str], ...] | None = None
    class_name: str | None = None
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        given = ((_field_name(self.path), self.path.name),) if self.files is None else tuple(map(tuple, self.files))
        object.__setattr__(self, "files", given)

    @property
    def paths(self) -> tuple[Path | Url, ...]:
        """All files of the item."""
        return tuple(self.path.with_name(name) for _, name in self.files or ())

    def open(self) -> "_Files":
        """Read the files."""
        return _Files(self)


class _Files:
    """The `Recording` of one item, which is in memory."""

    n_samples = 1

    def __init__(self, given: FilesInput) -> None:
        self._given = given
        self._fields: dict[str, Any] = {}
        for (name, _), path in zip(given.files or (), given.paths, strict=True):
            found = _read_file(name, path, given.remote)
            repeated = sorted(self._fields.keys() & found.keys())
            if repeated:
                raise SourceError(f"The files of {given.path} must have different fields, got {repeated[0]!r} twice.")
            self._fields |= found
        try:
            check_fields(self._fields, "metadata")
        except OptionError as error:
            raise SourceError(f"Could not convert {given.path}: {error}") from error
        self.about: Mapping[str, Any] = {"format": "files", "fields": list(self._fields)}
        if given.class_name is not None:
            self.about = {**self.about, "label_column": "class"}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = ()

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return 0 and 1: a file has one item."""
        starts = check_numbers(numbers, 1, self._given.path)
        return np.stack([starts, starts + 1], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield the item, as often as asked for."""
        path, class_name = self._given.path, self._given.class_name
        for _ in check_numbers(numbers, 1, path).tolist():
            metadata = {"file": path.name, "folder": folder_name(path)}
            yield dict(self._fields), metadata if class_name is None else {**metadata, "class": class_name}

    def close(self) -> None:
        """Do nothing: the files are closed."""


def _suffix(path: Path | Url) -> str:
    """Return the suffix of a file; of a compressed one with the suffix of what is compressed, such as `.nii.gz`."""
    *others, last = PurePosixPath(path.name).suffixes or [""]
    inner = others[-1] if others and last.lower() in _COMPRESSED else ""
    return inner + last if len(inner) <= _LONGEST and not inner[1:].isdigit() else last


def _field_name(path: Path | Url) -> str:
    extension = _suffix(path).lower().removeprefix(".")
    if extension == "npy":
        return "data"
    return _SAME.get(extension, extension) or "data"


def _read_file(field: str, path: Path | Url, remote: RemoteOptions | None) -> dict[str, Any]:
    """Return the fields of one file."""
    with open_bytes(path, remote) as file:
        try:
            content = file.readall() or b""
        except ReadError:
            raise
        except OSError as error:
            raise ReadError(f"Could not read {path}: {cause(error)}.") from error
    if not content:
        raise SourceError(f"A file must not be empty, but {path} is.")
    suffix = PurePosixPath(path.name).suffix.lower()
    if suffix in _ARRAYS:
        try:
            found = decode(suffix[1:], content)
        except ValueError as error:
            raise SourceError(f"Could not convert {path}: {error}.") from error
        return dict(found) if suffix == ".npz" else {field: found}
    digits = content.strip() if suffix == ".cls" else b""
    if digits.isdigit() and len(digits) < 20 and int(digits) < 1 << 63:
        return {field: np.int64(digits)}
    return {field: content}


def has_images(folder: Path) -> bool:
    """Return whether a folder or its subfolders contain images."""
    return any(path.suffix.lower() in IMAGE_EXTENSIONS for path in find_files(folder))


def find_files(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, sorted, without hidden ones and those of file managers."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.name.lower() not in _OF_SYSTEMS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def group_files(files: Sequence[tuple[Path, Path | None]]) -> list[FilesInput]:
    """Return one input for each stem: the files of a folder whose names differ in nothing but their suffixes.

    Parameters
    ----------
    files
        Each file, and the folder that it was found in; None if the file itself was given. If all items of a folder are
        in subfolders, the first subfolder is the class of the item.
    """
    stems: dict[Path, list[Path]] = {}
    for path, _ in files:
        stems.setdefault(path.with_name(path.name.removesuffix(_suffix(path))), []).append(path)
    stems = _leave_out_strays(stems)
    names = _name_fields(stems)
    classes = _find_classes([(path, root) for path, root in files if path in names])
    found = []
    for paths in stems.values():
        fields = tuple((names[path], path.name) for path in paths)
        found.append(FilesInput(paths[0], fields, classes.get(paths[0])))
    _check_complete(found)
    return found


def _leave_out_strays(stems: dict[Path, list[Path]]) -> dict[Path, list[Path]]:
    """Return the stems with a main file, which comes first: an image, otherwise audio, otherwise an array."""
    present = {path.suffix.lower() for paths in stems.values() for path in paths}
    main = next((kind for kind in _MAIN_KINDS if present.intersection(kind)), ())
    if not main:
        return stems
    kept, strays = {}, []
    for stem, found in stems.items():
        paths = sorted(found, key=lambda path: path.suffix.lower() not in main)
        if paths[0].suffix.lower() in main:
            kept[stem] = paths
        else:
            strays += paths
    if strays:
        shown = f"{', '.join(path.name for path in strays[:3])}{', …' if len(strays) > 3 else ''}"
        what = {IMAGE_EXTENSIONS: "image", EXTENSIONS: "audio file"}.get(main, "array")
        _LOG.warning("Left out %d of the files (%s): no %s has the same stem.", len(strays), shown, what)
    return kept


def _name_fields(stems: Mapping[Path, list[Path]]) -> dict[Path, str]:
    """Return the field of each file. Images of several formats share a field if every item has one image."""
    names = {path: _field_name(path) for paths in stems.values() for path in paths}
    images = [[path for path in paths if path.suffix.lower() in IMAGE_EXTENSIONS] for paths in stems.values()]
    counts = Counter(names[path] for paths in images for path in paths)
    if len(counts) < 2 or any(len(paths) != 1 for paths in images):
        return names
    field = min(counts, key=lambda name: (-counts[name], name))
    others = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if name != field)
    _LOG.warning("Images of several formats are stored in the field %r, as they are: %s among them.", field, others)
    return names | {path: field for (path,) in images}


def _find_classes(files: Sequence[tuple[Path, Path | None]]) -> dict[Path, str]:
    """Return the class of each file in a folder whose files all are in subfolders."""
    parts = {path: path.relative_to(root).parts for path, root in files if root is not None}
    without = {root for path, root in files if root is not None and len(parts[path]) == 1}
    return {path: parts[path][0] for path, root in files if root is not None and root not in without}


def _check_complete(inputs: Sequence[FilesInput]) -> None:
    """Raise SourceError if an item lacks a file that others have."""
    everything = {field: name for given in inputs for field, name in given.files or ()}
    wrong = [
        f"{given.path}: {', '.join(f'no {field}' for field in sorted(lacks))}"
        for given in inputs
        if (lacks := everything.keys() - {field for field, _ in given.files or ()})
    ]
    if wrong:
        shown = wrong if len(wrong) <= _MOST_LINES else [*wrong[: _MOST_LINES - 1], f"… and {len(wrong) - 19:,} more"]
        lines = "\n".join(f"  {line}" for line in shown)
        raise SourceError(
            f"All items must have the same files ({', '.join(sorted(everything))}), but {len(wrong)} of {len(inputs)} "
            f"lack some. Add them, or give patterns of the files to convert, such as 'DIR/*.png':\n{lines}"
        )
