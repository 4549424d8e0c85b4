"""A FIFO, a socket, a device or a folder where zarr has a file: an error that names it, and never a wait.

`run_isolated` turns a hang into a failure.
"""

import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_cases import some_cases
from penstock_test_parts import run_isolated

from penstock import PenstockError, Span
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr.check_store import check_store
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource

DATA = np.arange(1, 201, dtype="i4").reshape(50, 4)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}
ARRAYS: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2},
    "v3": {},
    "shards": {"chunks": (5, 4), "shards": (10, 4)},
    "read by zarr-python": {"zarr_format": 2, "order": "F"},
}


def replaced(path: Path, kind: str) -> None:
    path.unlink()
    SPECIAL[kind](path)


def write(path: Path, options: dict[str, Any]) -> Path:
    zarr.create_array(path, **{"data": DATA, "chunks": (10, 4), **options})
    return path


def chunk_file(path: Path) -> Path:
    return path / "2.0" if (path / ".zarray").exists() else path / "c" / "2" / "0"


def refusals(*calls: Callable[[], Any]) -> list[str]:
    """Return the errors of several calls, in a process of its own."""
    found = []
    for call in calls:
        with pytest.raises(PenstockError) as caught:
            call()
        found.append(str(caught.value))
    return found


@some_cases(6)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("options", ARRAYS.values(), ids=ARRAYS)
def test_a_special_file_as_chunk_is_an_error(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a", options)
    for opened in (True, False):
        source = ZarrSource(path)
        if opened:
            replaced(chunk_file(path), kind)
        for message in run_isolated(refusals, lambda source=source: source.read(Span(0, 50)), seconds=120):
            assert str(path) in message
        assert source.read(Span(30, 50))["data"].tobytes() == DATA[30:].tobytes()
    problems = run_isolated(lambda: [str(problem) for problem in check_store(path)[1]])
    assert problems
    assert all("chunk (" in problem for problem in problems)


@some_cases(7)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (".zarray", {"zarr_format": 2}),
        ("zarr.json", {}),
        (".zarray", {"zarr_format": 2, "order": "F"}),
        (".zattrs", {"zarr_format": 2, "order": "F"}),
        ("zarr.json", {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}),
    ],
)
def test_a_special_file_as_metadata_is_an_error(tmp_path: Path, kind: str, name: str, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a", options)
    replaced(path / name, kind)
    calls = [lambda: ZarrSource(path), lambda: ZarrSource(tmp_path, ["a"])]
    for message in run_isolated(refusals, *calls):
        assert str(tmp_path) in message, message


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_as_metadata_of_a_volume_are_errors(tmp_path: Path, kind: str) -> None:
    group = zarr.create_group(tmp_path / "em", zarr_format=2)
    group.create_array("s0", data=np.ones((4, 4, 4), "u1"))
    (tmp_path / "em" / ".zattrs").unlink(missing_ok=True)
    SPECIAL[kind](tmp_path / "em" / ".zattrs")
    assert ".zattrs" in run_isolated(refusals, lambda: Multiscale.opened(tmp_path / "em"))[0]


# -- shapes ------------------------------------------------------------------------------------------------------------

SIZES = [-1, 0, 1 << 53, 1 << 62, (1 << 64) - 1, 10**40, 1.5, True, None, "3", []]


@some_cases(8)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("place", ["shape", "chunks", "both"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, {"order": "F"}], ids=["fast", "read by zarr-python"])
def test_absurd_shapes_give_errors_of_penstock_and_take_no_memory(
    tmp_path: Path, version: int, place: str, axis: int, options: dict[str, Any]
) -> None:
    if version == 3 and options:
        options = {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}
    path = write(tmp_path / "a", {"zarr_format": version, **options})
    shown = run_isolated(_read_with_sizes, path, version, place, axis)
    assert all(found in ("PenstockError", "read") for found in shown), dict(zip(map(str, SIZES), shown, strict=True))
    assert "PenstockError" in shown


def _read_with_sizes(path: Path, version: int, place: str, axis: int) -> list[str]:
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (1 << 31)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    file = path / (".zarray" if version == 2 else "zarr.json")
    metadata = json.loads(file.read_bytes())
    shown = []
    for size in SIZES:
        content = json.loads(json.dumps(metadata))
        chunks = content["chunks"] if version == 2 else content["chunk_grid"]["configuration"]["chunk_shape"]
        for sizes in {"shape": [content["shape"]], "chunks": [chunks], "both": [content["shape"], chunks]}[place]:
            sizes[axis] = size
        file.write_text(json.dumps(content))
        shown.append(_read_all(path))
    return shown


def _read_all(path: Path) -> str:
    try:
        source = ZarrSource(path, threads=1)
        source.take(np.array([0, len(source.index) - 1]))
        image = Multiscale.plain(path, (1, 1), axes="yx")
        volume = VolumeSource({"raw": VolumeArray(image, (1, 1), (1, 1))}, threads=1)
        volume.take(np.array([0]))
    except PenstockError:
        return "PenstockError"
    except BaseException as error:
        return repr(error)
    return "read"
