"""The device behind a path: file system, mount, remote or local, rotating or not. Needs no NumPy, and never raises."""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.files.regular import read_regular

__all__ = ["Device", "find_device"]

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_REMOTE = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "pvfs2", "afs", "9p"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"),
    *("fuse.mount-s3", "fuse.goofys", "fuse.blobfuse2"),
}
_MOUNTS = Path("/proc/self/mounts")
_BLOCK_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Device:
    """The file system of a path, and the device below it."""

    file_system: str
    """Type of the file system as in `mount`, such as `"ext4"`; `"unknown"` without /proc; of a URL, its scheme."""

    mount: str
    """Where it is mounted; a URL itself."""

    is_rotating: bool | None = None
    """What the kernel says: True for hard disks, and often for virtual disks that are none; None if unknown."""

    @property
    def is_remote(self) -> bool:
        """Whether another machine stores the files."""
        return self.file_system in _REMOTE or self.is_url

    @property
    def is_url(self) -> bool:
        """Whether the files are objects at a URL, which is not mounted."""
        return "://" in self.mount

    @property
    def is_memory(self) -> bool:
        """Whether the files are in main memory."""
        return self.file_system in _IN_MEMORY

    def __str__(self) -> str:
        if self.is_url:
            return self.mount
        kinds = ["network file system"] * self.is_remote + ["in memory"] * self.is_memory
        return f"{self.mount} ({', '.join([self.file_system, *kinds])})"


def find_device(path: str | os.PathLike[str], mounts: Path = _MOUNTS, block_devices: Path = _BLOCK_DEVICES) -> Device:
    """Return the device behind a path, which need not exist."""
    real = os.path.realpath(path)
    best, kind, source = "", "unknown", ""
    with suppress(OSError):
        for line in os.fsdecode(read_regular(mounts)).splitlines():
            words = line.split()
            place = words[1].encode("latin-1", "replace").decode("unicode_escape", "replace") if len(words) > 2 else ""
            inside = real == place or real.startswith(f"{place.rstrip('/')}/")
            if place and inside and len(place) >= len(best):
                best, kind, source = place, words[2], words[0]
    return Device(kind, best or "/", _find_rotating(real, source, block_devices))


def _find_rotating(real: str, source: str, block_devices: Path) -> bool | None:
    """Return whether the disk of a path rotates; file systems over several disks have no number of their own."""
    numbers = []
    with suppress(OSError):
        numbers.append(os.stat(real).st_dev)  # noqa: PTH116  # a string
    with suppress(OSError):
        status = os.stat(source)  # noqa: PTH116
        numbers += [status.st_rdev] if stat.S_ISBLK(status.st_mode) else []
    for number in numbers:
        device = block_devices / f"{os.major(number)}:{os.minor(number)}"
        for folder in (device, device / ".."):  # the queue of a partition is that of its disk
            with suppress(OSError):
                return read_regular(folder / "queue" / "rotational").strip() == b"1"
    return None
