"""A store of zarr-python over a folder or a URL, whose bytes come as those of any other array do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NoReturn

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from penstock.core.errors import PenstockError, ReadError
from penstock.core.text import cause
from penstock.source.stored.zarr.store_folder import StoreFolder

__all__ = ["FolderStore"]


class FolderStore(Store):
    """Reads a folder; nothing is written or listed.

    1. A FIFO, a socket, a device or a folder in place of a file: ReadError, before it is opened.
    2. A chunk that is missing, or too large when it is decoded: what `check` raises.

    Parameters
    ----------
    check
        Called with each key and its stored size, None if it is missing.
    """

    supports_writes = supports_deletes = supports_consolidated_metadata = supports_listing = False

    def __init__(self, folder: StoreFolder, check: Callable[[str, int | None], None] = lambda *_: None) -> None:
        super().__init__(read_only=True)
        self._folder, self._check = folder, check

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderStore) and other._folder == self._folder

    def __hash__(self) -> int:
        return hash(self._folder)

    def __repr__(self) -> str:
        return f"FolderStore({self._folder})"

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return a value, or a part of it; None if it is missing."""
        content = await asyncio.to_thread(self._read, key, byte_range)
        return None if content is None else prototype.buffer.from_bytes(content)

    def _read(self, key: str, byte_range: Any) -> bytes | None:
        try:
            with self._folder.open_object(key, whole=byte_range is None) as file:
                self._check(key, file.n_bytes)
                begin, end = 0, file.n_bytes
                if isinstance(byte_range, RangeByteRequest):
                    begin, end = byte_range.start, min(end, byte_range.end)
                elif isinstance(byte_range, SuffixByteRequest):
                    begin = max(0, end - byte_range.suffix)
                elif isinstance(byte_range, OffsetByteRequest):
                    begin = byte_range.offset
                return file.read(begin, max(0, end - begin)).tobytes()
        except (FileNotFoundError, NotADirectoryError):
            self._check(key, None)
            return None
        except PenstockError:
            raise
        except OSError as error:
            raise ReadError(f"Could not read {self._folder}/{key}: {cause(error)}.") from error

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Return parts of values."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether there is a value."""
        return (await asyncio.to_thread(self._folder.list_sizes, [key])) != [None]

    def list(self) -> AsyncIterator[str]:
        """Raise: nothing is listed."""
        self._refuse()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:  # noqa: ARG002
        """Raise: nothing is listed."""
        self._refuse()

    def list_dir(self, prefix: str) -> AsyncIterator[str]:  # noqa: ARG002
        """Raise: nothing is listed."""
        self._refuse()

    async def set(self, key: str, value: Any) -> None:  # noqa: ARG002
        """Raise: nothing is written."""
        self._refuse()

    async def delete(self, key: str) -> None:  # noqa: ARG002
        """Raise: nothing is removed."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PermissionError(f"{self!r} only reads.")
