"""Cases of writing and stored damage."""

import os
import resource
import shutil
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaign.peers.adapter import Adapter, N, NotOfferedError, sample
from bench.campaign.peers.judge import Outcome, apart, flip_each, judge, judge_read, try_to

__all__ = ["ALL", "STORAGE", "check_storage", "write"]

ALL = range(N)


def write(adapter: Adapter, folder: Path, make: Any = sample, **options: Any) -> None:
    """Write in a process of its own: what a writer leaves behind must not matter to who reads."""
    apart(lambda: adapter.write(folder, ALL, make, **options), seconds=30.0)


def check_storage(adapter: Adapter) -> None:
    if adapter.package == "torchdata":
        raise NotOfferedError("it has no storage format of its own")


def second_member(path: Path) -> tuple[int, int]:
    """Return where the second member of a tar begins, with its extension headers, and where its payload is."""
    with tarfile.open(path) as tar:
        member = tar.getmembers()[1]
    return member.offset, member.offset_data


def other(number: int) -> np.ndarray:
    return sample(number + 50)


def failing(number: int) -> np.ndarray:
    if number == 6:
        raise ValueError("the user's own error")
    return sample(number)


def dying(number: int) -> np.ndarray:
    if number == 6:
        os.killpg(0, signal.SIGKILL)
    return sample(number)


def write_in_child(adapter: Adapter, folder: Path, make: Any, **options: Any) -> None:
    """Write in a process group of its own, which may be killed."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            adapter.write(folder, ALL, make, **options)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def is_none(adapter: Adapter, folder: Path) -> tuple[bool, str]:
    """Return whether nothing can be read, and how reading fails."""
    outcome, detail = judge_read(adapter, folder, ALL)
    return outcome == "error" or detail.startswith("0 samples"), detail


# -- writing -----------------------------------------------------------------------------------------------------------


def killed_and_resumed(adapter: Adapter, folder: Path) -> Outcome:
    if adapter.package != "litdata":
        check_storage(adapter)
        raise NotOfferedError("a killed writer cannot be resumed")
    write_in_child(adapter, folder, dying, use_checkpoint=True)
    found = try_to(lambda: adapter.write(folder, ALL, use_checkpoint=True))
    return found or judge_read(adapter, folder, ALL)


def killed(adapter: Adapter, folder: Path) -> Outcome:
    check_storage(adapter)
    write_in_child(adapter, folder, dying)
    nothing, detail = is_none(adapter, folder)
    return ("error" if nothing else "silent"), f"the reader: {detail}"


def full_disk(adapter: Adapter, folder: Path) -> Outcome:
    """No file may have more than 300 bytes (EFBIG)."""

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        adapter.write(folder, ALL)

    found = try_to(write)
    if found is None:
        return judge_read(adapter, folder, ALL)
    nothing, detail = is_none(adapter, folder)
    return ("error" if nothing else "silent"), f"{found[1]}; the reader afterwards: {detail}"[:200]


def two_writers(adapter: Adapter, folder: Path) -> Outcome:
    """Write another dataset into the same folder while the first writer is in its middle."""
    check_storage(adapter)
    begun, go = folder.parent / "begun", folder.parent / "go"

    def make(number: int) -> np.ndarray:
        if number == 6:
            begun.touch()
            wait_for(go)
        return sample(number)

    child = os.fork()
    if child == 0:
        try:
            adapter.write(folder, ALL, make)
        finally:
            os._exit(0)
    wait_for(begun)
    second = try_to(lambda: adapter.write(folder, ALL, other))
    go.touch()
    os.waitpid(child, 0)
    if second:
        return second[0], f"the second writer: {second[1]}"
    outcome, detail = judge_read(adapter, folder, ALL)
    return outcome, f"both wrote; the reader: {detail}"


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def vanished(adapter: Adapter, folder: Path) -> Outcome:
    def make(number: int) -> np.ndarray:
        if number == 6:
            shutil.rmtree(folder, ignore_errors=True)
        return sample(number)

    found = try_to(lambda: adapter.write(folder, ALL, make))
    return found or judge_read(adapter, folder, ALL)


def users_error(adapter: Adapter, folder: Path) -> Outcome:
    found = try_to(lambda: adapter.write(folder, ALL, failing))
    nothing, detail = is_none(adapter, folder)
    if found is None:
        return "silent", f"the error did not arrive; the reader: {detail}"
    return ("error" if nothing else "silent"), f"{found[1]}; the reader afterwards: {detail}"[:200]


def too_large(adapter: Adapter, folder: Path) -> Outcome:
    found = try_to(lambda: adapter.write(folder, ALL, limit=50))
    return found or judge_read(adapter, folder, ALL)


# -- stored damage -----------------------------------------------------------------------------------------------------


def after(change: Any) -> Any:
    """Return the case: write, change the folder, read."""

    def case(adapter: Adapter, folder: Path) -> Outcome:
        write(adapter, folder)
        whole = judge_read(adapter, folder, ALL)
        assert whole[0] == "right", whole
        change(adapter, folder)
        return judge_read(adapter, folder, ALL)

    return case


def cut_within(adapter: Adapter, folder: Path) -> None:
    path = adapter.shards(folder)[1]
    size = path.stat().st_size
    os.truncate(path, second_member(path)[1] + 100 if path.suffix == ".tar" else size * 5 // 8)


def cut_between(adapter: Adapter, folder: Path) -> None:
    """Cut where a sample ends."""
    path = adapter.shards(folder)[1]
    if path.suffix == ".tar":
        os.truncate(path, second_member(path)[0])
    elif adapter.header:
        offsets = np.frombuffer(path.read_bytes()[4 : adapter.header], np.uint32)
        os.truncate(path, int(offsets[2]))
    else:
        os.truncate(path, path.stat().st_size // 2)


def spread(path: Path, begin: int, end: int) -> list[int]:
    """Return about 30 places between two others, of bytes that are not padding."""
    content = path.read_bytes()
    used = [place for place in range(begin, end) if content[place]]
    return used[:: max(1, len(used) // 30)]


def flip_header(adapter: Adapter, folder: Path) -> Outcome:
    write(adapter, folder)
    path = adapter.shards(folder)[1]
    if path.suffix == ".tar":
        end = second_member(path)[1]
        return flip_each(adapter, folder, range(end - 512, end, 21), ALL)
    end = adapter.header or 64
    return flip_each(adapter, folder, spread(path, 0, end), ALL)


def flip_payload(adapter: Adapter, folder: Path) -> Outcome:
    write(adapter, folder)
    path = adapter.shards(folder)[1]
    if path.suffix == ".tar":
        begin = second_member(path)[1]
        places = list(range(begin + 128, begin + 192, 2))  # the numbers in the .npy
    else:
        places = spread(path, adapter.header or 64, path.stat().st_size)
    return flip_each(adapter, folder, places, ALL)


def remove_shard(adapter: Adapter, folder: Path) -> Outcome:
    write(adapter, folder)
    urls = [str(path) for path in adapter.shards(folder)]
    adapter.shards(folder)[1].unlink()
    if adapter.package in ("webdataset", "grain"):  # files are named, as in a brace pattern
        return judge(lambda: [value for batch in adapter.loader(folder, urls=urls) for value in batch], ALL)
    return judge_read(adapter, folder, ALL)


def put_foreign(adapter: Adapter, folder: Path) -> None:
    elsewhere = folder.parent / "other"
    write(adapter, elsewhere, other)
    shutil.copyfile(adapter.shards(elsewhere)[1], adapter.shards(folder)[1])


def swap(adapter: Adapter, folder: Path) -> None:
    first, _, third, *_ = adapter.shards(folder)
    content = first.read_bytes()
    first.write_bytes(third.read_bytes())
    third.write_bytes(content)


def stale_manifest(adapter: Adapter, folder: Path) -> None:
    manifest = adapter.manifest(folder).read_bytes()
    shutil.rmtree(folder)
    write(adapter, folder, other)
    adapter.manifest(folder).write_bytes(manifest)


def cut_manifest(adapter: Adapter, folder: Path) -> None:
    path = adapter.manifest(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


STORAGE: dict[int, Any] = {
    1: killed_and_resumed,
    2: killed,
    3: full_disk,
    4: two_writers,
    5: vanished,
    6: users_error,
    10: too_large,
    11: after(cut_within),
    12: after(cut_between),
    13: flip_header,
    14: flip_payload,
    15: remove_shard,
    16: after(put_foreign),
    17: after(swap),
    18: after(stale_manifest),
    19: after(cut_manifest),
}
