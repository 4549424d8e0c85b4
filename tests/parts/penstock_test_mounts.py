"""Small file systems of a process's own: mounted in a namespace that ends with it, without being root.

Where the system does not allow it (some containers, some kernels), `enter_mount_namespace` says so.
"""

import ctypes
import os
from pathlib import Path

__all__ = ["enter_mount_namespace", "mount_tmpfs", "resize_tmpfs", "set_read_only", "unmount"]

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _PRIVATE, _RECURSIVE = 1, 32, 4096, 1 << 18, 16384
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter_mount_namespace() -> str | None:
    """Give this process, which has one thread, mounts of its own; return why that is not allowed, or None."""
    user, group = os.getuid(), os.getgid()
    try:
        _check(_LIBC.unshare(_NEW_USER | _NEW_MOUNTS), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _check(_LIBC.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "mount /")
    except OSError as error:
        return str(error)
    return None


def mount_tmpfs(place: Path, options: str) -> None:
    """Mount an empty file system, with options such as "size=64k,nr_inodes=20"."""
    _check(_LIBC.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options.encode()), f"mount {place}")


def resize_tmpfs(place: Path, options: str) -> None:
    """Change the options of a file system that `mount_tmpfs` mounted; what is in it stays."""
    _check(_LIBC.mount(b"tmpfs", os.fsencode(place), b"tmpfs", _REMOUNT, options.encode()), f"remount {place}")


def set_read_only(place: Path) -> None:
    """Let nothing be written to a folder from now on, by its path; files that are open stay as they are."""
    name = os.fsencode(place)
    _check(_LIBC.mount(name, name, None, _BIND, None), f"mount {place}")
    _check(_LIBC.mount(None, name, None, _BIND | _REMOUNT | _READ_ONLY, None), f"remount {place}")


def unmount(place: Path) -> None:
    """Remove a file system, and all that is in it."""
    _check(_LIBC.umount2(os.fsencode(place), 2), f"unmount {place}")  # also while a file in it is open


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
