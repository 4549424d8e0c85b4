"""Memory that processes share: forked ones, and spawned ones to which it is passed when they start.

It has no name to leave behind, and the size of /dev/shm does not limit it.
"""

import mmap
import os
import weakref
from multiprocessing import context, reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import WorkerError
from penstock.files.unnamed import open_unnamed

__all__ = ["SharedPages"]


class SharedPages:
    """Bytes that are 0 at first. Only pages that are touched take memory, so that most of them may stay unused."""

    _mapped: NDArray[np.uint8] | None = None

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._keep(open_unnamed())
        os.ftruncate(self._fd, n_bytes)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All bytes, writable; arrays on them stay valid when this object is gone."""
        if self._mapped is None:
            try:
                mapped = mmap.mmap(self._fd, self.n_bytes)
            except OSError as error:
                raise WorkerError(
                    f"Worker processes need {self.n_bytes >> 20:,} MiB of addresses for batches, most of which take no "
                    f"memory, but the system gives none: {error.strerror}. Raise the limit of addresses (ulimit -v), "
                    "or use executor='threads'."
                ) from error
            self._mapped = np.frombuffer(mapped, np.uint8)
        return self._mapped

    def read(self, n_bytes: int, at: int) -> bytes:
        """Return a copy of some bytes; takes no memory for pages that nobody wrote to."""
        return os.pread(self._fd, n_bytes, at)

    def write(self, content: bytes, at: int) -> None:
        """Write bytes; all processes see them at once."""
        os.pwrite(self._fd, content, at)

    def __getstate__(self) -> dict[str, Any]:
        context.assert_spawning(self)
        return {"n_bytes": self.n_bytes, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.n_bytes = state["n_bytes"]
        self._keep(state["fd"].detach())

    def _keep(self, file: int) -> None:
        self._fd = file
        weakref.finalize(self, os.close, file)
