"""Cases of hostile input, and of values that are hard to store."""

import gzip
import io
import os
import pickle
import resource
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaign.peers.adapter import Adapter, NotOfferedError, sample
from bench.campaign.peers.judge import Outcome, apart, judge_read, shorten, try_to
from bench.campaign.peers.storage import ALL, check_storage, write

__all__ = ["HOSTILE"]


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def put_tar(folder: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    folder.mkdir()
    with tarfile.open(folder / "shard-000000.tar", "w") as tar:
        for info, payload in members:
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def npy(number: int) -> bytes:
    out = io.BytesIO()
    np.save(out, sample(number))
    return out.getvalue()


def pickled(adapter: Adapter, folder: Path) -> Outcome:
    trace = folder.parent / "trace"
    if adapter.package == "grain":
        raise NotOfferedError("records are bytes, which the user decodes")
    if adapter.package == "webdataset":
        put_tar(folder, [(tarfile.TarInfo("a.pyd"), pickle.dumps(Evil(str(trace))))])
        found = try_to(lambda: list(adapter.loader(folder, suffix="pyd")))
    else:
        write(adapter, folder, lambda number: Evil(str(trace)), column="pkl")
        found = try_to(lambda: adapter.read(folder))
    if trace.exists():
        return "silent", "the code in the pickle ran"
    return found or ("right", "the pickle did not run")


def outside(adapter: Adapter, folder: Path) -> Outcome:
    """A name with ../: of a tar member, or of a shard in the manifest."""
    if adapter.package == "webdataset":
        put_tar(folder, [(tarfile.TarInfo(f"../../{n:06d}.x.npy"), npy(n)) for n in ALL])
        before = set(folder.parent.rglob("*"))
        outcome, detail = judge_read(adapter, folder, ALL)
        return (
            ("silent", "files were written outside") if set(folder.parent.rglob("*")) != before else (outcome, detail)
        )
    write(adapter, folder)
    path, shard = adapter.manifest(folder), adapter.shards(folder)[1]
    shutil.move(shard, folder.parent / shard.name)
    path.write_text(path.read_text().replace(f'"{shard.name}"', f'"../{shard.name}"'))
    outcome, detail = judge_read(adapter, folder, ALL)
    return ("silent", "a file outside of the dataset was read") if outcome == "right" else (outcome, detail)


def links(adapter: Adapter, folder: Path) -> Outcome:
    if adapter.package != "webdataset":
        check_storage(adapter)
        raise NotOfferedError("there are no members")
    link = tarfile.TarInfo("000005.x.npy")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    put_tar(folder, [(tarfile.TarInfo(f"{n:06d}.x.npy") if n != 5 else link, npy(n) if n != 5 else b"") for n in ALL])
    return judge_read(adapter, folder, ALL)


def absurd_size(adapter: Adapter, folder: Path) -> Outcome:
    write(adapter, folder)
    path = adapter.shards(folder)[1]
    content = bytearray(path.read_bytes())
    if path.suffix == ".tar":
        info = tarfile.TarInfo("000004.x.npy")
        info.size = 1 << 40
        content[:512] = info.tobuf(tarfile.GNU_FORMAT)[:512]
    elif adapter.header:
        content[4:8] = (2**32 - 1).to_bytes(4, "little")  # where the first sample begins
        content[8:12] = (2**32 - 1).to_bytes(4, "little")
    else:
        raise NotOfferedError("sizes are within checksums")
    path.write_bytes(content)
    return judge_read(adapter, folder, ALL)


def bomb(adapter: Adapter, folder: Path) -> Outcome:
    """A gigabyte of zeros in five megabytes."""
    zeros = gzip.compress(bytes(1 << 24), 1)
    suffix = {}
    if adapter.package == "webdataset":
        put_tar(folder, [(tarfile.TarInfo("a.x.npy.gz"), zeros * 64)])
        suffix = {"suffix": "x.npy.gz"}
    elif adapter.package == "mosaicml-streaming":
        write(adapter, folder, compression="gz")
        adapter.shards(folder)[1].write_bytes(zeros * 64)
    else:
        check_storage(adapter)
        raise NotOfferedError("there is no compression by gzip")

    def read() -> tuple[str, int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            list(adapter.loader(folder, **suffix))
            said = "no error"
        except Exception as error:
            said = shorten(error)
        return said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10

    said, megabytes = apart(read, seconds=50.0)
    if megabytes > 900:
        return "silent", f"{megabytes} MB were taken for 5 MB; {said}"
    return ("silent" if said == "no error" else "error"), f"{said}; {megabytes} MB taken"


def json_bomb(adapter: Adapter, folder: Path) -> Outcome:
    if adapter.package == "webdataset":
        put_tar(folder, [(tarfile.TarInfo("a.json"), b"[" * 200_000)])
        found = try_to(lambda: list(adapter.loader(folder, suffix="json")))
        return found or ("silent", "no error")
    write(adapter, folder)
    adapter.manifest(folder).write_text("[" * 200_000)
    return judge_read(adapter, folder, ALL)


def round_trip(adapter: Adapter, folder: Path) -> Outcome:
    """Big-endian, 0-d, bool, empty and structured arrays."""
    if adapter.package == "grain":
        raise NotOfferedError("records are bytes, which the user encodes")
    record = np.array([(1, 2.5)], [("a", "i2"), ("b", "f4")])
    values = [np.arange(3, dtype=">i4"), np.array(7, "i8"), np.array([True, False]), np.zeros((0, 3), "f4"), record]
    wrong = []
    for number, value in enumerate(values):
        place = folder.parent / f"set{number}"
        try:
            apart(lambda place=place, value=value: adapter.write(place, range(1), lambda _: value))
            found = np.asarray(apart(lambda place=place: adapter.read(place))[0])
        except NotOfferedError:
            raise
        except Exception as error:
            wrong.append(("error", f"{value.dtype} {value.shape}: {shorten(error)}"))
            continue
        is_same = found.shape == value.shape and np.array_equal(found, value)
        if not is_same or found.dtype.newbyteorder("=") != value.dtype.newbyteorder("="):
            wrong.append(("silent", f"{value.dtype} {value.tolist()} came back as {found.dtype} {found.tolist()}"))
    return min(wrong, key=lambda one: one[0] != "silent") if wrong else ("right", "5 arrays")


def no_samples(adapter: Adapter, folder: Path) -> Outcome:
    found = try_to(lambda: adapter.write(folder, range(0)))
    return found or judge_read(adapter, folder, range(0))


HOSTILE: dict[int, Any] = {
    23: pickled,
    24: outside,
    25: links,
    26: absurd_size,
    27: bomb,
    28: json_bomb,
    58: no_samples,
    61: round_trip,
}
