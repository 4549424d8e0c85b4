"""How a source reads from a URL: the store, and where bytes are kept."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.files.spans.folder import CacheFolder, measure_folder
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place

__all__ = ["RemoteOptions"]

_FREE_SHARE = 0.8  # of the free disk: what a cache may take by default


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options of a source that reads from a URL; picklable."""

    store: StoreOptions | None = None
    cache: Path | None = None
    """The cache folder; None: only what is needed next is kept, in memory."""

    cache_bytes: int = 0
    """What the cache folder may hold."""

    @classmethod
    def parse(
        cls,
        where: Path | Url,
        store: StoreOptions | None,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int | None,
    ) -> "RemoteOptions":
        """Return the options that a source was given; raise OptionError if they do not go together.

        Parameters
        ----------
        cache_bytes
            None: four fifths of the disk's free bytes, and what the folder holds already.
        """
        given = {"store": store, "cache": cache, "cache_bytes": cache_bytes}
        names = [name for name, value in given.items() if value is not None]
        if names and not isinstance(where, Url):
            raise OptionError(f"{names[0]} is for URLs, got the local path {where}. Leave it out.")
        if store is not None and not isinstance(store, StoreOptions):
            raise OptionError(f"store must be StoreOptions, got {type(store).__name__}.")
        if cache is None:
            if cache_bytes is not None:
                raise OptionError(f"cache_bytes={cache_bytes} needs cache, the folder to keep them in.")
            return cls(store)
        folder = parse_place(cache)
        if isinstance(folder, Url):
            raise OptionError(f"cache must be a folder of this machine, got the URL {str(folder)!r}.")
        if cache_bytes is not None:
            check_integer("cache_bytes", cache_bytes, at_least=1)
        CacheFolder(folder, cache_bytes or 0)  # creates it, or says why it cannot be one
        if cache_bytes is None:
            cache_bytes = int(_FREE_SHARE * shutil.disk_usage(folder).free) + measure_folder(folder)
        return cls(store, folder, cache_bytes)
