"""A zarr-python store that hands out nothing unchecked: special files, missing chunks, wrong checksums, bombs."""

import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, Protocol

from zarr.storage import WrapperStore

from penstock.core.errors import ReadError
from penstock.core.text import cause
from penstock.files.regular import open_descriptor

__all__ = ["CheckedStore", "ChunkGuard"]


class ChunkGuard(Protocol):
    """Decides what may be handed out of an array; each method raises if something is wrong."""

    def refuse_missing(self, key: str) -> None:
        """Look at a key that is missing."""
        ...

    def check_size(self, key: str, stored_bytes: int) -> None:
        """Look at the stored size of a key, before it is decoded."""
        ...

    def is_unverified(self, key: str, status: os.stat_result) -> bool:
        """Return whether `verify` must see the whole file of a key."""
        ...

    def verify(self, key: str, content: bytes, status: os.stat_result) -> None:
        """Look at the whole content of a file."""
        ...


class CheckedStore(WrapperStore[Any]):
    """Reads through another store.

    1. A FIFO, a socket, a device or a folder in place of a file of a local store: ReadError, before it is opened.
    2. A chunk that is missing, too large when it is decoded, or has another checksum: what `guard` raises.

    Parameters
    ----------
    root
        Folder of the store on this machine; None if it is elsewhere.
    """

    def __init__(self, store: Any, root: Path | None = None, guard: ChunkGuard | None = None) -> None:
        super().__init__(store)
        self._root, self._guard = root, guard

    def _with_store(self, store: Any) -> "CheckedStore":
        return CheckedStore(store, self._root, self._guard)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return a value, or a part of it; None if it is missing."""
        status = self._look_at(key)
        value = await self._store.get(key, prototype, byte_range)
        guard = self._guard
        if guard is None:
            return value
        if value is None:
            guard.refuse_missing(key)
            return value
        if status is not None or byte_range is None:
            guard.check_size(key, len(value) if status is None else status.st_size)
        if status is not None and guard.is_unverified(key, status):
            whole = value if byte_range is None else await self._store.get(key, prototype)
            guard.verify(key, b"" if whole is None else whole.to_bytes(), status)
        return value

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Return parts of values."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def _get_many(self, requests: Iterable[tuple[str, Any, Any]]) -> AsyncGenerator[tuple[str, Any], None]:
        for key, prototype, byte_range in requests:
            yield key, await self.get(key, prototype, byte_range)

    def _look_at(self, key: str) -> os.stat_result | None:
        if self._root is None:
            return None
        try:
            handle, status = open_descriptor(self._root / key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"Could not read {self._root / key}: {cause(error)}.") from error
        os.close(handle)
        return status
