"""Takes away what only Linux has, here and in all processes that are started; a `sitecustomize` of `test_elsewhere.py`.

It is imported before anything else, so that no module sees the names when it is imported.
"""

import builtins
import ctypes
import fcntl
import io
import multiprocessing.context
import os
import resource
import signal
from typing import Any

_NAMES = {
    os: [
        *(
            "memfd_create",
            "sched_getaffinity",
            "sched_setaffinity",
            "posix_fadvise",
            "posix_fallocate",
            "preadv",
            "pwritev",
        ),
        *("RWF_NOWAIT", "sendfile", "splice", "copy_file_range", "O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME"),
        *("pidfd_open", "eventfd", "fdatasync", "getrandom", "pipe2"),
    ],
    fcntl: ["F_OFD_SETLK", "F_OFD_SETLKW", "F_SETSIG", "F_SETPIPE_SZ", "F_GETPIPE_SZ"],
    resource: ["RUSAGE_THREAD"],
    signal: ["pidfd_send_signal"],
}
_FUNCTIONS = {"sync_file_range", "prctl", "memfd_create", "posix_fadvise", "preadv2"}
_FOLDERS = ("/proc", "/sys", "/dev/shm")


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTIONS and not self._name:
            raise AttributeError(name)
        return super().__getattr__(name)


def _hide(module: Any, name: str) -> None:
    """Let a function that is given a path find nothing below the folders that only Linux has."""
    real = getattr(module, name)

    def function(*arguments: Any, **options: Any) -> Any:
        path = arguments[0] if arguments else None
        if isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            if text.startswith(_FOLDERS):
                raise FileNotFoundError(2, "No such file or directory", text)
        return real(*arguments, **options)

    setattr(module, name, function)


for _module, _names in _NAMES.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
for _name in ("open", "stat", "lstat", "scandir", "listdir", "readlink", "statvfs", "access"):
    _hide(os, _name)
_hide(io, "open")
builtins.open = io.open
ctypes.CDLL = _Library  # type: ignore[misc]
ctypes.cdll._dlltype = _Library
multiprocessing.context._default_context.set_start_method("spawn")  # as macOS does
