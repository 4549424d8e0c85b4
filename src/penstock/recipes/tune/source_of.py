"""From a path to a source, for commands: what lies there says what it is."""

from pathlib import Path

import numpy as np

from penstock.core.errors import SourceError
from penstock.core.protocols import Source
from penstock.source.array import ArraySource
from penstock.source.stored.source import ZarrSource
from penstock.source.tar.source import TarSource

__all__ = ["source_of"]

_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")


def source_of(where: str) -> Source:
    """Return a source of what lies at `where`: a folder of shards (or a pattern), a zarr store, or an npy file.

    Examples
    --------
    >>> source_of("nowhere.npy")
    Traceback (most recent call last):
    ...
    penstock.core.errors.SourceError: There is no file nowhere.npy.
    """
    path = Path(where)
    if path.suffix == ".npy":
        try:
            return ArraySource({path.stem or "x": np.load(path, mmap_mode="r", allow_pickle=False)})
        except FileNotFoundError as error:
            raise SourceError(f"There is no file {where}.") from error
        except (OSError, ValueError) as error:
            raise SourceError(f"{where} is no npy file that can be read: {error}") from error
    if any((path / name).is_file() for name in _ZARR_FILES):
        return ZarrSource(where)
    return TarSource(where)
