"""Which items a job writes, in which order, in which shards."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_convert_parts import Taped, tapes

from penstock.convert.fingerprint import Stamp, fingerprint, read_stamp
from penstock.convert.plan import BadInput, Job, Scan, Scanner
from penstock.convert.splits import Split
from penstock.core.errors import MissingDependency
from penstock.shard.outputs.write_options import WriteOptions


def scan(number: int, n_items: int = 100, folder: str = "/data") -> Scan:
    path = Path(folder) / f"tape_{number}.npy"
    return Scan(Taped(path), n_items, {}, {}, (), {"data": "float32"}, Stamp(number, 1), f"digest {number}")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Several stretches of several inputs."""
    spans = []
    for number in range(draw(st.integers(1, 4))):
        borders = sorted(draw(st.sets(st.integers(0, 100), min_size=2, max_size=6)))
        spans += [(number, start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False)]
    scans = tuple(scan(number) for number in range(4))
    return Job(Path("/out"), WriteOptions(draw(st.integers(1, 50))), scans, tuple(spans))


def locate(job: Job) -> list[tuple[str, int]]:
    """Return file and number of each item, in the order in which they are written."""
    found = []
    for number in range(job.n_shards):
        task = job.task(number)
        assert (task.number, task.first) == (number, number * job.options.shard_size)
        found += [
            (task.inputs[which].path.name, item)
            for which, item in zip(task.which.tolist(), task.numbers.tolist(), strict=True)
        ]
    return found


@given(jobs())
def test_the_tasks_of_a_job_hold_every_item_of_its_spans_once(job: Job) -> None:
    wanted = [(f"tape_{number}.npy", item) for number, start, stop in job.spans for item in range(start, stop)]
    assert locate(job) == wanted
    assert job.n_items == len(wanted)


@given(jobs())
def test_all_shards_but_the_last_are_full(job: Job) -> None:
    sizes = [len(job.task(number).numbers) for number in range(job.n_shards)]
    assert set(sizes[:-1]) <= {job.options.shard_size}
    assert 1 <= sizes[-1] <= job.options.shard_size


@given(jobs())
def test_a_task_names_only_the_inputs_that_it_needs_with_their_stamps(job: Job) -> None:
    for number in range(job.n_shards):
        task = job.task(number)
        assert set(task.which.tolist()) == set(range(len(task.inputs)))
        stamps = {entry.input: entry.stamp for entry in job.scans}
        assert [stamps[entry] for entry in task.inputs] == list(task.stamps)


def job_of(given: list[Taped]) -> Job:
    scans = [Scanner(Split())(entry) for entry in given]
    assert not any(isinstance(entry, BadInput) for entry in scans)
    spans = tuple((number, 0, entry.n_items) for number, entry in enumerate(scans))
    return Job(given[0].path.parent / "out", WriteOptions(4), tuple(scans), spans)


def test_the_identity_is_that_of_names_content_and_options_not_of_folders(tmp_path: Path) -> None:
    here, there = (job_of(tapes(tmp_path / name)) for name in ("here", "there"))
    assert here.identity() == there.identity()
    json.loads(here.identity())
    others = [
        replace(here, options=WriteOptions(5)),
        replace(here, scans=here.scans[::-1]),
        replace(here, spans=here.spans[:2]),
        job_of(tapes(tmp_path / "longer", (7, 5, 10))),
        job_of(tapes(tmp_path / "renamed", names=("a", "b", "c"))),
        job_of(tapes(tmp_path / "windows", sequence_length=1)),
    ]
    assert len({here.identity(), *(other.identity() for other in others)}) == len(others) + 1


def test_the_identity_of_items_in_any_order_is_short_and_tells_each_order_apart() -> None:
    numbers = np.random.default_rng(0).permutation(200_001)
    runs = np.stack([np.zeros_like(numbers), numbers, numbers + 1], axis=1)
    job = Job(Path("/out"), WriteOptions(4), (scan(0),), runs)
    assert job.n_items == len(numbers)
    assert job.task(3).numbers.tolist() == numbers[12:16].tolist()
    assert len(job.identity()) < 2_000
    assert replace(job, spans=runs.copy()).identity() == job.identity()
    swapped = runs[[1, 0, *range(2, len(runs))]]
    assert replace(job, spans=swapped).identity() != job.identity()


def test_looking_at_an_input_tells_what_it_holds(tmp_path: Path) -> None:
    (given,) = tapes(tmp_path / "in", (10,), ("anna_1",), sequence_length=3)
    found = Scanner(Split((("a", 0.6), ("b", 0.4)), "time"))(given)
    assert isinstance(found, Scan)
    assert (found.n_items, found.name, dict(found.fields)) == (3, "anna_1.npy", {"data": "float32"})
    assert dict(found.groups) == {"subject": "anna"}
    assert (found.stamp, found.digest) == (read_stamp(given.path), fingerprint(given.path))
    # windows of rows 0–3, 3–6, 6–9; a border after 5.4 rows
    assert found.spans == {"a": [(0, 1)], "b": [(2, 3)]}


@pytest.mark.parametrize("content", [b"", b"no array", np.lib.format.MAGIC_PREFIX])
def test_looking_at_what_is_no_input_tells_why(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    found = Scanner(Split())(Taped(path))
    assert isinstance(found, BadInput)
    assert found.path == path
    assert found.reason
    assert str(found) == found.reason  # which names the file
    assert found.reason.count(str(path)) == 1


def test_a_package_that_is_missing_is_nothing_about_the_file(tmp_path: Path) -> None:
    def missing() -> None:
        raise MissingDependency("pynwb", "nwb", "Reading NWB files")

    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(MissingDependency, match=r"penstock\[nwb\]"):
        Scanner(Split())(SimpleNamespace(path=tmp_path / "a", open=missing))  # type: ignore[arg-type]
