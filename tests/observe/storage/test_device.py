"""What lies behind a path: file system, mount, and whether its disk rotates, as far as the system says."""

import os
from pathlib import Path

import pytest

from penstock.observe.storage.device import Device, find_device


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """A table of mounts; the innermost one that a path is in counts, and spaces are written as \\040."""
    path = tmp_path / "mounts"
    path.write_text(
        "overlay / overlay rw 0 0\n"
        "server:/export /mnt nfs4 rw 0 0\n"
        "/dev/nvme0n1p1 /mnt/a\\040b ext4 rw 0 0\n"
        "s3 /mnt/bucket fuse.s3fs rw 0 0\n"
        "odd line\n"
    )
    return path


def test_the_innermost_mount_counts(mounts: Path, tmp_path: Path) -> None:
    none = tmp_path / "none"
    found = {path: find_device(path, mounts, none) for path in ("/x", "/mnt/x", "/mnt/a b/x", "/mnt/bucket", "/mnta")}
    assert {path: (device.file_system, device.mount, device.is_remote) for path, device in found.items()} == {
        "/x": ("overlay", "/", False),
        "/mnt/x": ("nfs4", "/mnt", True),
        "/mnt/a b/x": ("ext4", "/mnt/a b", False),
        "/mnt/bucket": ("fuse.s3fs", "/mnt/bucket", True),
        "/mnta": ("overlay", "/", False),
    }
    assert str(found["/mnt/x"]) == "/mnt (nfs4, network file system)"


@pytest.mark.parametrize(("flag", "is_rotating"), [("1", True), ("0", False)])
@pytest.mark.parametrize("is_partition", [False, True])
def test_the_disk_of_a_file_or_of_its_partition_rotates_or_not(
    tmp_path: Path, flag: str, is_rotating: bool, is_partition: bool
) -> None:
    number = os.stat(tmp_path).st_dev  # noqa: PTH116
    disk = tmp_path / "devices" / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue" / "rotational").write_text(f"{flag}\n")
    (disk / "sda1").mkdir()
    (tmp_path / "block").mkdir()
    link = tmp_path / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(disk / "sda1" if is_partition else disk)
    assert find_device(tmp_path, block_devices=tmp_path / "block").is_rotating is is_rotating
    assert find_device(tmp_path, block_devices=tmp_path / "elsewhere").is_rotating is None


def test_a_system_without_tables_is_unknown(tmp_path: Path) -> None:
    assert find_device("/nowhere/at/all", tmp_path / "none", tmp_path / "none") == Device("unknown", "/", None)


def test_files_in_shared_memory_are_in_memory() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this system has no /dev/shm")
    assert find_device("/dev/shm/x").is_memory
