"""Stores of zarr-python: one over a remote folder, and one that hands out nothing unchecked.

Requests, cache, retries and forks of the first are those of all remote data. The second refuses special files, missing
chunks and bombs.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Protocol

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.storage import WrapperStore

from penstock.core.errors import ReadError
from penstock.core.text import cause
from penstock.files.regular import open_descriptor
from penstock.files.spans.span import WHOLE, Span
from penstock.source.stored.zarr.store_folder import UrlFolder

__all__ = ["CheckedStore", "ChunkGuard", "RemoteStore"]


class ChunkGuard(Protocol):
    """Decides what may be handed out of an array; each method raises if something is wrong."""

    def refuse_missing(self, key: str) -> None:
        """Look at a key that is missing."""
        ...

    def check_size(self, key: str, stored_bytes: int) -> None:
        """Look at the stored size of a key, before it is decoded."""
        ...


class CheckedStore(WrapperStore[Any]):
    """Reads through another store.

    1. A FIFO, a socket, a device or a folder in place of a file of a local store: ReadError, before it is opened.
    2. A chunk that is missing, or too large when it is decoded: what `guard` raises.

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


class RemoteStore(Store):
    """Reads through a remote folder; nothing is written."""

    supports_writes = supports_deletes = supports_consolidated_metadata = False
    supports_listing = True

    def __init__(self, folder: UrlFolder) -> None:
        super().__init__(read_only=True)
        self._folder = folder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStore) and other._folder == self._folder

    def __hash__(self) -> int:
        return hash(self._folder)

    def __repr__(self) -> str:
        return f"RemoteStore({self._folder})"

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return a value, or a part of it; None if it is missing."""
        try:
            return await asyncio.to_thread(self._read, key, prototype, byte_range)
        except FileNotFoundError:
            return None

    def _read(self, key: str, prototype: Any, byte_range: Any) -> Any:
        remote, name = self._folder.remote, f"{self._folder.inner}{key}"
        if byte_range is None:
            span = Span(name, 0, WHOLE)
        elif isinstance(byte_range, RangeByteRequest):
            span = Span(name, byte_range.start, byte_range.end)
        else:
            n_bytes = remote.describe(name).n_bytes
            is_suffix = isinstance(byte_range, SuffixByteRequest)
            assert is_suffix or isinstance(byte_range, OffsetByteRequest), "zarr has no other requests"
            span = Span(name, max(0, n_bytes - byte_range.suffix) if is_suffix else byte_range.offset, n_bytes)
        (content,) = remote.get([span])
        return prototype.buffer.from_array_like(content)

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Return parts of values."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether there is a value."""
        return (await asyncio.to_thread(self._folder.list_sizes, [key])) != [None]

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin with `prefix`."""
        inner = self._folder.inner
        for info in await asyncio.to_thread(self._folder.remote.list_objects, f"{inner}{prefix}"):
            yield info.key.removeprefix(inner)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that follow `prefix` as a folder."""
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        seen = set()
        async for key in self.list_prefix(folder):
            name = key.removeprefix(folder).partition("/")[0]
            if name not in seen:
                seen.add(name)
                yield name

    async def set(self, key: str, value: Any) -> None:
        """Raise: nothing is written."""
        raise PermissionError(f"{self!r} is read-only, so {key} was not written ({len(value)} bytes).")

    async def delete(self, key: str) -> None:
        """Raise: nothing is removed."""
        raise PermissionError(f"{self!r} is read-only, so {key} was not removed.")
