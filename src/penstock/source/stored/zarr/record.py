"""Which chunks of an array were there when it was opened, and what a chunk that is missing means."""

from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.errors import OptionError, ReadError
from penstock.source.stored.zarr.keys import MAX_LISTED, ChunkKeys, StoredFiles, find_files, list_files
from penstock.source.stored.zarr.store_folder import StoreFolder, UrlFolder

__all__ = ["ChunkRecord", "MissingChunks", "check_missing_chunks"]

MissingChunks = Literal["error", "fill"] | None
"""What a missing chunk is; None: the fill value if it was missing when the array was opened, an error otherwise."""

_MAX_OBJECTS = 100_000  # that a server lists: a hundred requests
_MAX_ASKED = 10_000  # that a server without lists is asked for


def check_missing_chunks(given: Any) -> None:
    """Raise OptionError if `missing_chunks` is none of its values."""
    if given not in ("error", "fill", None):
        raise OptionError(f"missing_chunks must be 'error', 'fill' or None, got {given!r}.")


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Which chunks must be there."""

    missing: MissingChunks = None
    stored: StoredFiles | None = None
    """None: not known."""

    @classmethod
    def take(cls, folder: StoreFolder, keys: ChunkKeys | None, missing: MissingChunks) -> "ChunkRecord":
        """Return the record of an array.

        Which chunks are stored at a URL is not known, unless the folder says that they are looked up: to list them may
        take a minute for each 100,000.
        """
        if missing is not None or keys is None:
            return cls(missing)
        if folder.remote is None:
            return cls(missing, list_files(folder.path, keys))
        return cls(missing, _list_objects(folder, keys) if folder.is_listed else None)

    @property
    def presence(self) -> str:
        """Short hash of which chunks are stored; empty if all are, or that is not known."""
        return "" if self.stored is None else self.stored.digest

    def refuse_missing(self, where: str, file: int | None) -> str | None:
        """Return why a missing chunk is an error; None if it is the fill value.

        Parameters
        ----------
        where
            Path of its file.
        file
            Number of its file; None if the file is there, but not the chunk in it.
        """
        if self.missing == "fill" or file is None:
            return None
        advice = "Restore it, or use missing_chunks='fill' to read fill values in place of missing chunks"
        if self.missing == "error":
            return f"{where} is missing. {advice}"
        if self.stored is None:
            return (
                f"{where} is missing, and whether it was ever stored is not known: its array cannot be listed, because "
                f"it is at a URL or has more than {MAX_LISTED:,} files. {advice}, if it is a sparse array"
            )
        return f"{where} is missing, but was there when the array was opened. {advice}" if file in self.stored else None


def _list_objects(folder: UrlFolder, keys: ChunkKeys) -> StoredFiles | None:
    """Return which chunks of an array are stored at a URL; None if there are too many to ask for."""
    if keys.n_files > _MAX_OBJECTS:
        return None
    try:
        return find_files(folder.list_names("c/" if keys.prefix == "c/" else ""), keys)
    except ReadError:  # a web server lists nothing; if it is another fault, the next request meets it, too
        if keys.n_files > _MAX_ASKED:
            return None
    names = [keys.key(keys.coordinates(number)) for number in range(keys.n_files)]
    sizes = folder.list_sizes(names)
    return find_files((name for name, size in zip(names, sizes, strict=True) if size is not None), keys)
