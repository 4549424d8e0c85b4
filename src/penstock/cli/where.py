"""Check the paths given to commands. If there is no dataset, say what is there and which command makes one of it."""

import difflib
import shlex
from collections import Counter
from pathlib import Path

from penstock.core.errors import SourceError
from penstock.core.text import about_unread, count
from penstock.files.regular import open_regular
from penstock.files.stores.url import is_url, parse_place

__all__ = [
    "check_archives",
    "check_dataset",
    "check_exists",
    "check_input",
    "is_dataset",
    "is_recording",
    "is_run",
    "is_source",
    "is_store",
]

_MANIFEST = "dataset_metadata.json"  # shard.manifest has it too, and imports numpy
_TARS = (".tar", ".tgz")
_RECORDINGS = (".nwb", ".npz", ".npy", ".zarr", ".flac", ".mp3", ".ogg", ".wav")
_ZARR = ("zarr.json", ".zgroup", ".zarray")


def is_dataset(where: str) -> bool:
    """Return whether a dataset of shards is at a path; its reader reports what is wrong with it. True for a URL."""
    path = Path(where)
    indexed = path.is_file() and path.with_name(f"{path.name}.metadata.json").exists()
    return (_is_pattern(where) and not is_source(where)) or indexed or (path / _MANIFEST).exists()


def is_run(where: str) -> bool:
    """Return whether a path is that of a run file, as `Watch.save` writes it."""
    path = Path(where)
    if is_url(where) or not path.is_file() or path.suffix != ".json":
        return False
    with open_regular(path) as file:
        return b'"penstock_run"' in file.read(64)


def check_dataset(where: str) -> None:
    """Raise SourceError, with what to do, if there is no dataset at a path."""
    _check_url(where)
    if is_dataset(where):
        return
    path = Path(where)
    check_exists(where)
    raise SourceError(_about_folder(path) if path.is_dir() else _about_file(path))


def is_recording(where: str) -> bool:
    """Return whether a path is that of one recording, which `penstock convert` could read."""
    path = Path(where)
    if not path.is_dir():
        return path.is_file() and path.name.lower().endswith((*_RECORDINGS, ".zarr.zip"))
    return path.suffix.lower() in (".zarr", ".nwb") or any((path / name).exists() for name in _ZARR)


def is_source(where: str) -> bool:
    """Return whether a path is that of what `penstock.open` reads in place: HDF5, tables, or folders of images."""
    from penstock.shard.decoders.images import IMAGES  # noqa: PLC0415  # imports numpy
    from penstock.source.stored.folders import HDF5_SUFFIXES  # noqa: PLC0415
    from penstock.source.table.find_parts import TABLE_EXTENSIONS  # noqa: PLC0415

    path, images = Path(where), [f".{extension}" for extension in IMAGES]
    if is_url(where) or (path / _MANIFEST).exists() or is_recording(where):
        return False
    if any(part.suffix.lower() in HDF5_SUFFIXES and part.is_file() for part in (path, *path.parents)):
        return True
    if not path.is_dir():
        return path.suffix.lower() in (*TABLE_EXTENSIONS, *images) and (path.exists() or _is_pattern(where))
    entries = list(path.iterdir())
    if any(map(_is_tar, entries)):
        return False
    has_tables = any(entry.suffix.lower() in TABLE_EXTENSIONS for entry in entries)
    return has_tables or any(entry.suffix.lower() in images for entry in path.glob("*/*"))


def is_store(where: str) -> bool:
    """Return whether a path is that of a zarr store, or of a folder of zarr stores without archives."""
    path = Path(where)
    if not path.is_dir() or (path / _MANIFEST).exists():
        return False
    if any((path / name).exists() for name in _ZARR):
        return True
    entries = list(path.iterdir())
    return any(entry.suffix == ".zarr" and entry.is_dir() for entry in entries) and not any(map(_is_tar, entries))


def check_archives(where: str) -> None:
    """Raise SourceError, with what to do, if there are no archives to index."""
    _check_url(where)
    path = Path(where)
    if _is_pattern(where) or (path.is_dir() and any(_is_tar(entry) for entry in path.iterdir())):
        return
    check_exists(where)
    if path.is_dir():
        raise SourceError(_about_folder(path))
    if not _is_tar(path):
        raise SourceError(_about_file(path))


def check_input(where: str) -> None:
    """Raise SourceError, with what to do, if a conversion has nothing to read or nothing to do."""
    check_exists(where)
    path = Path(where)
    if not path.is_dir() or (path / _MANIFEST).exists():
        return
    entries = sorted(path.iterdir())
    if any(entry.suffix.lower() in _RECORDINGS for entry in entries):
        return
    if any(_is_tar(entry) for entry in entries):
        raise SourceError(
            f"{path} contains tar archives, which need no conversion. Index them: "
            f"penstock index {shlex.quote(str(path))}"
        )


def check_exists(where: str) -> None:
    """Raise SourceError, with the nearest name, if a path does not exist."""
    path = Path(where)
    if path.exists() or _is_pattern(where):
        return
    there = path.parent
    while not there.is_dir():
        there = there.parent
    lost = path.relative_to(there).parts[0]
    near = difflib.get_close_matches(lost, [entry.name for entry in there.iterdir()], n=1)
    hint = f" Did you mean {shlex.quote(str(there / near[0]))}?" if near else ""
    detail = "" if there in (path.parent, Path()) else f" ({there} has no {lost})"
    raise SourceError(f"No such file or folder: {where}{detail}.{hint}")


def _check_url(where: str) -> None:
    """Raise SourceError, with what to do, if a URL is that of a recording."""
    if is_url(where) and str(parse_place(where)).lower().endswith((*_RECORDINGS, ".zarr.zip")):
        raise SourceError(
            f"{where} is a recording, not a dataset, and recordings are looked into on this machine only. Copy it, or "
            f"make a dataset of it: {_convert_command(where)}"
        )


def _about_file(path: Path) -> str:
    if _is_tar(path) and (path.parent / _MANIFEST).exists():
        return f"{path} is one shard of a dataset. Give its folder: {shlex.quote(str(path.parent))}"
    if _is_tar(path):
        return f"{path} has no index. Make one: penstock index {shlex.quote(str(path))}"
    if path.suffix.lower() in _RECORDINGS:
        return f"{path} is a recording, not a dataset. Make one: {_convert_command(str(path))}"
    if is_source(str(path)):
        return (
            f"{path} is not a dataset of shards, which this is for. penstock.open({str(path)!r}) reads it where it is; "
            f"look at it: penstock inspect {shlex.quote(str(path))}"
        )
    if path.suffix:
        return about_unread(path)
    return f"{path} is not a dataset, which is a folder with {_MANIFEST}."


def _about_folder(path: Path) -> str:
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if (path / ".writing").is_dir():
        return (
            f"No dataset in {path}: its writer has not finished. "
            "Run `penstock convert` again with --resume to continue, or with --overwrite to start again."
        )
    if not entries:
        return f"No dataset in {path}: the folder is empty."
    return (
        _about_datasets(path, entries)
        or _about_recordings(path, entries)
        or (_about_file(path) if is_source(str(path)) else "")
        or f"No dataset in {path}: it has no {_MANIFEST}, no tar archives and no recordings."
    )


def _about_datasets(path: Path, entries: list[Path]) -> str:
    patterns = [entry.name.removesuffix(".metadata.json") for entry in entries if entry.match("*.tar*.metadata.json")]
    if patterns:
        return f"The archives in {path} were indexed by a pattern. Give it: {shlex.quote(str(path / patterns[0]))}"
    below = [entry.name for entry in entries if (entry / _MANIFEST).exists()]
    if not below:
        return ""
    names = ", ".join(below[:5]) + (", …" if len(below) > 5 else "")
    unfinished = [entry.name for entry in entries if (entry / ".writing").is_dir() and entry.name not in below]
    rest = ", ".join(unfinished)
    more = f" Not published yet: {rest}; run `penstock convert` again with --resume." if unfinished else ""
    return f"{path} is not a dataset, but contains {names}. Give one of them: {shlex.quote(str(path / below[0]))}{more}"


def _about_recordings(path: Path, entries: list[Path]) -> str:
    if any((path / name).exists() for name in _ZARR):
        return f"{path} is a zarr store, not a dataset. Make one: {_convert_command(str(path))}"
    tars = [entry for entry in entries if _is_tar(entry)]
    if tars:
        archives, command = count(len(tars), "tar archive"), f"penstock index {shlex.quote(str(path))}"
        return f"{path} has {archives} and no index. Make one: {command}"
    found = Counter(entry.suffix.lower() for entry in entries if entry.suffix.lower() in _RECORDINGS)
    if not found:
        return ""
    suffix, number = found.most_common(1)[0]
    files, command = count(number, f"{suffix} file"), _convert_command(str(path / f"*{suffix}"))
    return f"No dataset in {path}, but {files}. Make one: {command}"


def _convert_command(what: str) -> str:
    return f"penstock convert {shlex.quote(what)} --output DIR"


def _is_pattern(where: str) -> bool:
    return any(letter in Path(where).name for letter in "{*?[") or is_url(where)


def _is_tar(path: Path) -> bool:
    return path.is_file() and (path.suffix in _TARS or ".tar" in path.suffixes)
