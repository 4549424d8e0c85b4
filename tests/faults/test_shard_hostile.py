"""Hostile archives, end to end: indexed and read like any other, without running their code or trusting their sizes."""

import collections
import gzip
import io
import json
import os
import pickle
import resource
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import run_isolated

from penstock import ReadError, StoreOptions, TarSource
from penstock.core.errors import DamageError, OptionError, PenstockError, SourceError
from penstock.shard.index_tars import index_archives
from penstock.shard.verify import verify_shards

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def archive(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def payloads(trace: Path) -> dict[str, tuple[str, bytes]]:
    """Return members that would create `trace`, or take all memory, if they were believed."""
    call = Calls(os.system, f"touch {trace}")
    objects = io.BytesIO()
    np.save(objects, np.array([call], object), allow_pickle=True)
    zipped = io.BytesIO()
    np.savez(zipped, x=np.array([call], object))
    large = (
        b"\x93NUMPY\1\0\x76\0"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
        + b"\n"
    )
    return {
        "pickle": ("pyd", pickle.dumps(call)),
        "pickle in a list": ("pkl", pickle.dumps([1, call])),
        "pickled array of objects": ("pickle", pickle.dumps(np.array([call], object))),
        "array of objects": ("x.npy", objects.getvalue()),
        "archive of objects": ("npz", zipped.getvalue()),
        "tensor": ("pt", saved({"x": call})),
        "ordered": ("pth", saved(collections.OrderedDict(x=call))),
        "array of terabytes": ("x.npy", large),
        "deep JSON": ("json", b"[" * 200_000),
        "text that is none": ("txt", b"\xff\xfe"),
    }


@pytest.mark.parametrize("kind", payloads(Path("trace")))
def test_a_hostile_member_is_reported_or_refused_with_its_item_and_nothing_runs(kind: str, tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "set"
    suffix, payload = payloads(trace)[kind]
    archive(folder / "a.tar", [(f"good.{suffix}", payload), (f"bad.{suffix}", payload)])
    manifest, problems = index_archives(folder)
    if manifest is None:
        assert {(problem.shard, problem.item) for problem in problems} == {("a.tar", 0), ("a.tar", 1)}
    else:
        source = TarSource(folder)
        for item in range(2):
            with pytest.raises(DamageError) as caught:
                source.take(np.array([item]))
            assert (caught.value.shard, caught.value.item) == ("a.tar", item)
        assert verify_shards(folder)[1] == []  # the bytes are those that were written
    assert not trace.exists()


def test_pickles_run_only_if_allowed(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "set"
    archive(folder / "a.tar", [("one.pyd", payloads(trace)["pickle"][1])])
    index_archives(folder)
    assert TarSource(folder, decode=False).take(np.array([0]))["pyd"][0] == payloads(trace)["pickle"][1]
    assert not trace.exists()
    TarSource(folder, allow_pickle=True).take(np.array([0]))
    assert trace.exists()


def test_a_hostile_member_is_substituted_like_a_damaged_one(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "set"
    members = [(f"item{number}.pyd", pickle.dumps(number)) for number in range(5)]
    archive(folder / "a.tar", [*members, ("item5.pyd", payloads(trace)["pickle"][1])])
    index_archives(folder)
    found = TarSource(folder, on_error="substitute").take(np.arange(6))["pyd"].tolist()
    assert found[:5] == list(range(5))
    assert found[5] in range(5)
    (line,) = (folder / "quarantine.jsonl").read_text().splitlines()
    assert (json.loads(line)["item"], "system" in json.loads(line)["reason"]) == (5, True)
    assert not trace.exists()


def links() -> list[tarfile.TarInfo]:
    found = []
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
        info = tarfile.TarInfo("a.cls")
        info.type, info.linkname = kind, "/etc/passwd"
        found.append(info)
    return [*found, *map(tarfile.TarInfo, ("/etc/a.cls", "../a.cls", "x/../../a.cls"))]


@pytest.mark.parametrize("number", range(8))
def test_links_devices_and_names_that_point_outside_are_reported(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.tar").write_bytes(links()[number].tobuf() + bytes(1024))
    manifest, problems = index_archives(folder)
    assert manifest is None
    assert [problem.shard for problem in problems] == ["a.tar"]


@pytest.mark.parametrize(
    "where",
    [
        "pipe:touch trace",
        "pipe:cat a.tar|",
        "http://localhost:1/a.tar",
        "file:a.tar",
        "-",
        "s3://bucket/a.tar",
        "a.tar; touch trace",
    ],
)
def test_an_address_is_never_a_command(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    archive(tmp_path / "a.tar", [("one.cls", b"1")])
    store = StoreOptions(retries=0) if "://" in where else None
    with pytest.raises((SourceError, OptionError, ReadError)):
        index_archives(where, store=store)
    with pytest.raises((SourceError, OptionError, ReadError)):
        TarSource(where, store=store)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def index_within(folder: Path, gigabytes: int) -> tuple[str, int]:
    """Index and read with little memory; return what came of it, and the megabytes that were taken."""
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        manifest, problems = index_archives(folder)
        outcome = str(problems[0]) if manifest is None else str(TarSource(folder).take(np.array([0])))
    except PenstockError as error:
        outcome = str(error)
    return outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


def test_a_gzip_bomb_is_reported_and_takes_no_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 1 << 34
    piece = gzip.compress(bytes(1 << 24), 1)
    # Members of gzip one after the other are one stream: 16 gigabytes of zeros in 75 megabytes would be slow to make.
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf()) + piece * 80)
    outcome, megabytes = run_isolated(index_within, tmp_path, 6)
    assert "a.tar.gz" in outcome
    assert "bomb" in outcome
    assert megabytes < 100


def test_an_absurd_size_is_reported_and_takes_no_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = 1 << 40
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    outcome, megabytes = run_isolated(index_within, tmp_path, 6)
    assert "truncated" in outcome
    assert megabytes < 100


COUNTS = [
    10_000,
    pytest.param(1_000_000, marks=pytest.mark.skipif(not SOAK, reason="slow; PENSTOCK_TESTS=soak")),
]


def write_members(path: Path, names: Iterable[str]) -> None:
    with path.open("wb") as out:
        out.writelines(tarfile.TarInfo(name).tobuf() for name in names)
        out.write(bytes(1024))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_very_many_items_are_indexed(count: int, tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", (f"{number}.bin" for number in range(count)))
    outcome, megabytes = run_isolated(index_within, tmp_path, 6, seconds=800)
    assert outcome == "{'bin': array([b''], dtype=object)}"
    assert megabytes < 300 + count // 1000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_an_item_of_very_many_members_is_read_or_refused(count: int, tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", (f"a.{number}" for number in range(count)))
    outcome, megabytes = run_isolated(index_within, tmp_path, 6, seconds=800)
    assert ("more than 10,000 extensions" in outcome) == (count > 10_000)
    assert megabytes < 300


_FORGED = {
    "a bomb": ("x.npy.gz", gzip.compress(bytes(1 << 24), 1) * 17),
    "lists in lists": ("mp", b"\x91" * 1_000_000),
    "elements without end": ("mp", b"\xdd\xff\xff\xff\xff"),
    "no sound": ("wav", b"RIFF\xff\xff\xff\xffWAVEfmt "),
    "no text": ("cls", b"\xff\xfe"),
}


@pytest.mark.parametrize("kind", _FORGED)
def test_a_forged_member_is_damage_of_its_item(kind: str, tmp_path: Path) -> None:
    extension, payload = _FORGED[kind]
    archive(tmp_path / "a.tar", [("one.txt", b"1"), (f"one.{extension}", payload)])
    outcome, megabytes = run_isolated(index_within, tmp_path, 6)
    assert f"item 0 in a.tar: {extension!r}: " in outcome
    assert megabytes < 800  # a member may take 256 MiB, twice while its parts are joined
