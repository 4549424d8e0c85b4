"""An object of a store as a seekable file that is read, such as by h5py.

An object is read in blocks of a fixed size, so that all readers of a machine ask for the same spans of it.
"""

import gc
import io
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.span import Span

__all__ = ["RemoteFile"]

_BLOCK_BYTES = 1 << 20  # at 20 ms and 150 MB/s, a smaller one comes hardly sooner
_KEPT_BLOCKS = 8  # which h5py goes back to for a few bytes each time
_MOST_AHEAD = 32  # blocks


class _CollectionPause:
    """Keeps Python from collecting garbage while it is entered, by any number of threads.

    h5py holds a lock while it reads from a file, and its finalizers need that lock. If a thread that fetches the bytes
    collected garbage with a file of h5py in it, both would wait for each other forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_entered, self._was_enabled = 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_entered:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._n_entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_entered -= 1
            if not self._n_entered and self._was_enabled:
                gc.enable()


_PAUSE = _CollectionPause()


class RemoteFile(io.RawIOBase):
    """A file over an object of a folder; thread-safe. Closing it leaves the folder open.

    Who reads on where the last read ended gets the next blocks read ahead: one at first, then twice as many each time.

    Parameters
    ----------
    key
        Name of the object in the folder; empty if the URL of the folder is that of the object.
    block_bytes
        Size of the blocks.

    Examples
    --------
    >>> with RemoteFile(folder, "recording.nwb") as file, h5py.File(file) as recording:  # doctest: +SKIP
    ...     recording["units/spike_times"][:100]
    """

    def __init__(self, folder: RemoteFolder, key: str, *, block_bytes: int = _BLOCK_BYTES) -> None:
        super().__init__()
        self.folder, self.key = folder, key
        self.n_bytes: int = folder.describe(key).n_bytes
        """Size of the object."""
        self.error: Exception | None = None
        """What the last read that failed raised: h5py reports it without its type."""
        self._block_bytes = block_bytes
        self._lock = threading.RLock()
        self._position = 0
        self._kept: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._last = -1  # the block that was read last
        self._ahead = 0  # blocks
        self._prepared = 0  # one after the last block that was read ahead

    def __repr__(self) -> str:
        return f"RemoteFile({self.folder.url}/{self.key}, {self.n_bytes:,} bytes)"

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set where the next read begins, counted from the beginning, from here, or from the end; return it."""
        with self._lock:
            base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.n_bytes}[whence]
            if base + offset < 0:
                raise ValueError(f"A position must be >= 0, got {base + offset}.")
            self._position = base + offset
            return self._position

    def readinto(self, out: Any, /) -> int:
        """Fill `out` with what comes next; return the number of bytes, which is less only at the end."""
        with self._lock:
            found = self.read_at(self._position, out)
            self._position += found
            return found

    def read_at(self, begin: int, out: Any) -> int:
        """Fill `out` with bytes from `begin` on; return their number. The position stays as it is."""
        target = np.frombuffer(out, np.uint8)
        end = min(self.n_bytes, begin + len(target))
        if begin >= end:
            return 0
        try:
            with _PAUSE, self._lock:
                first, last = begin // self._block_bytes, (end - 1) // self._block_bytes
                self._read_ahead(first, last)
                for number in range(first, last + 1):
                    low = number * self._block_bytes
                    block = self._get(number)
                    inner = block[max(0, begin - low) : end - low]
                    at = max(0, low - begin)
                    target[at : at + len(inner)] = inner
        except Exception as error:
            self.error = error
            raise
        return end - begin

    def list_spans(self, begins: Iterable[int], ends: Iterable[int]) -> list[Span]:
        """Return the blocks that hold ranges of the file, each once, in this order."""
        numbers = (
            number
            for begin, end in zip(begins, ends, strict=True)
            if begin < (stop := min(end, self.n_bytes))
            for number in range(begin // self._block_bytes, -(-stop // self._block_bytes))
        )
        return [self._span(number) for number in dict.fromkeys(numbers)]

    def _span(self, number: int) -> Span:
        begin = number * self._block_bytes
        return Span(self.key, begin, min(begin + self._block_bytes, self.n_bytes))

    def _get(self, number: int) -> NDArray[np.uint8]:
        found = self._kept.get(number)
        if found is None:
            (found,) = self.folder.get([self._span(number)])
            self._kept[number] = found
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return found

    def _read_ahead(self, first: int, last: int) -> None:
        """Start to fetch blocks `first` … `last`, and those that follow if they are read in sequence."""
        if first == last and (first == self._last or first in self._kept):
            self._last = last
            return
        is_next = self._last in (first, first - 1)
        self._ahead = min(max(1, 2 * self._ahead), _MOST_AHEAD) if is_next and self._last >= 0 else 0
        begin = max(first, self._prepared) if is_next else first
        end = min(last + 1 + self._ahead, -(-self.n_bytes // self._block_bytes))
        self._last, self._prepared = last, max(end, begin)
        wanted = [number for number in range(begin, end) if number not in self._kept]
        if wanted and wanted != [first]:
            self.folder.prepare([self._span(number) for number in wanted])
