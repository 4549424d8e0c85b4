"""From what the user gives to files and URLs: patterns are expanded by listing a folder or a bucket."""

import fnmatch
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.convert.inputs.protocol import input_place
from penstock.core.errors import ReadError, SourceError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import open_store
from penstock.files.stores.url import Url

__all__ = ["expand_paths"]

_MAGIC = re.compile(r"[*?[]")


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
