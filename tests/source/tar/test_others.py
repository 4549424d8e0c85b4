"""Archives written by other tools read like our own, whatever their byte order, members and headers."""

import io
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import penstock_test_shards
import pytest
from penstock_source_suite import Case, ShortSuite, SourceSuite
from penstock_test_shards import (
    Kind,
    Sample,
    TarSuite,
    Truth,
    archive,
    check_in_a_spawned_process,
    grid,
    index_folder,
    npy,
)


def _foreign_orders(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    """Fortran order and big-endian arrays, written with tarfile; they are read in C order and native byte order."""
    folder.mkdir()
    members = [
        {
            "f.npy": npy(np.asfortranarray(grid(i + offset))),
            "big.npy": npy(grid(i + offset, ">i4")),
            "both.npy": npy(np.asfortranarray(grid(i + offset, ">f8"))),
            "c.npy": npy(grid(i + offset)),
        }
        for i in range(11)
    ]
    for number, start in enumerate(range(0, 11, 4)):
        archive(folder / f"part-{number}.tar", members[start : start + 4], start)
    index_folder(folder)

    def truth(i: int) -> Sample:
        kinds = {"f": "f4", "big": "i4", "both": "f8", "c": "f4"}
        return {name: grid(i + offset, dtype) for name, dtype in kinds.items()}

    return truth, 11, {}


def _foreign_geometry(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    """The same fields in shards of different layouts: member order, headers, other members, gzip."""
    folder.mkdir()

    def members(i: int) -> dict[str, bytes]:
        return {"x.npy": npy(np.int64(i + offset)), "y.npy": npy(grid(i + offset))}

    rows = [members(i) for i in range(15)]
    archive(folder / "a.tar", rows[:4], 0)
    archive(folder / "b.tar", [dict(reversed(row.items())) for row in rows[4:7]], 4)
    long = {"format": tarfile.PAX_FORMAT, "pax_headers": {"prefix": "l" * 120}}
    archive(folder / "c.tar", rows[7:10], 7, **long)
    archive(folder / "d.tar", [{"x.npy": r["x.npy"], "txt": b"between", "y.npy": r["y.npy"]} for r in rows[10:12]], 10)
    with tarfile.open(folder / "e.tar.gz", "w:gz") as tar:
        for number, row in enumerate(rows[12:], start=12):
            for suffix, payload in row.items():
                member = tarfile.TarInfo(f"zipped{number}.{suffix}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))
    index_folder(folder, allow_missing=True)
    return lambda i: {"y": grid(i + offset), "x": np.int64(i + offset)}, 15, {"fields": ["y", "x"]}


def _foreign_dtypes(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    """A field whose items have different dtypes: each item keeps its own."""
    folder.mkdir()
    kinds = ["f4", "i8", "u1"]
    for number, kind in enumerate(kinds):
        rows = [
            {"v.npy": npy(grid((i + offset) % 2, kind)), "cls": b"%d" % (i + offset)}
            for i in range(4 * number, 4 * number + 4)
        ]
        archive(folder / f"{number}.tar", rows, 4 * number)
    index_folder(folder)
    return lambda i: {"v": grid((i + offset) % 2, kinds[i // 4]), "cls": i + offset}, 12, {}


KINDS: dict[str, Kind] = {
    "foreign orders": _foreign_orders,
    "foreign geometries": _foreign_geometry,
    "foreign dtypes": _foreign_dtypes,
}
cases = penstock_test_shards.cases


class TestTarSource(ShortSuite):
    suite = TarSuite

    @pytest.fixture(params=KINDS)
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
        return cases(request.param)


@pytest.mark.parametrize("name", ["foreign geometries"])
def test_a_process_that_is_spawned_reads_the_same(cases: Callable[[str], Case], name: str) -> None:
    check_in_a_spawned_process(cases(name))


def test_threads_read_many_shards_while_the_source_is_closed_again_and_again(
    cases: Callable[[str], Case],
) -> None:
    case = cases("foreign geometries")  # five shards, each of a layout of its own
    source, failures, done = case.make(), [], threading.Event()
    turns = 60

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(turns):
                items = rng.integers(0, case.n_items, 8)
                SourceSuite.check(case, source.take(items), items.tolist())
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while not done.is_set():
        source.close()
    for thread in threads:
        thread.join()
    source.close()
    if failures:
        raise failures[0]
