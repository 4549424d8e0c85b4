"""Lengths of items: from a field, from single integers, given; and kept with their sort in a folder."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import (
    ArraySource,
    DatasetSource,
    Lengths,
    SourceError,
    WriteError,
    create_shards_from_arrays,
    item_lengths,
)
from penstock.core.protocols import Source
from penstock.source.combine import Concat, Renamed, Zip
from penstock.source.select.selectable import FewerFields, Take
from penstock.source.tar.source import TarSource

COUNTS = [3, 0, 70, 3, 12]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    tokens = [np.arange(count, dtype=np.uint16) for count in COUNTS]
    wide = [np.zeros((count, item + 1), np.float32) for item, count in enumerate(COUNTS)]
    fixed = np.zeros((5, 9))
    fields = {"tokens": tokens, "wide": wide, "fixed": fixed, "n_tokens": np.array(COUNTS), "score": np.ones(5)}
    create_shards_from_arrays(folder, fields, shard_size=2)
    return folder


@pytest.mark.parametrize(
    ("by", "expected"), [("tokens", COUNTS), ("wide", COUNTS), ("n_tokens", COUNTS), ("fixed", [9] * 5)]
)
def test_lengths_come_from_a_field_of_shards(shards: Path, by: str, expected: list[int]) -> None:
    source = TarSource(shards)
    lengths = item_lengths(source, by)
    assert lengths.values.tolist() == expected
    assert lengths.values.dtype == np.uint32
    assert lengths == item_lengths(source, expected) == Lengths(expected)


def test_lengths_of_arrays_in_shards_are_those_of_the_side_index(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TarSource(shards)
    assert source.axis_lengths("wide") is None  # more than one axis: it is read
    assert source.axis_lengths("n_tokens") is None
    read: list[int] = []
    take = TarSource.take

    def count_and_take(self: TarSource, items: Any, out: Any = None) -> Any:
        read.extend(items)
        return take(self, items, out)

    monkeypatch.setattr(TarSource, "take", count_and_take)
    assert item_lengths(source, "tokens").values.tolist() == COUNTS
    assert read == [0]
    for other, by, counts in (
        (Take(source, [4, 2, 2]).with_fields(["tokens"]), "tokens", [12, 70, 70]),
        (Concat([source, FewerFields(source, list(source.fields))]), "tokens", COUNTS * 2),
        (Zip([Renamed(source, {"tokens": "t"}), ArraySource({"x": np.arange(5)})]), "t", COUNTS),
    ):
        read.clear()
        assert (item_lengths(other, by).values.tolist(), set(read)) == (counts, {0})


def test_lengths_come_from_the_items_of_a_dataset() -> None:
    source = DatasetSource([{"text": "abc", "n": 5}, {"text": "", "n": np.int16(7)}])
    assert item_lengths(source, "text").values.tolist() == [3, 0]
    assert item_lengths(source, "n").values.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("token", r"by must be a field of .* \(tokens, .*\), got 'token'. Did you mean 'tokens'\?"),
        ("score", "'score' must have an axis or be an integer to be a length, got float64 in item 0"),
        ([1, 2], "one length for each of the 5 items, got 2"),
        (np.ones(5), "1-D array of integers, got float64"),
    ],
)
def test_what_is_no_length_is_refused(shards: Path, by: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        item_lengths(TarSource(shards), by)
    with pytest.raises(SourceError, match=r"got -1 in 'n' of item 1"):
        item_lengths(ArraySource({"n": np.array([1, -1])}), "n")


class Unreadable:
    """A source of which nothing may be read: its index and fields are those of another."""

    def __init__(self, source: Source) -> None:
        self.index, self.fields = source.index, source.fields


def test_a_cache_is_mapped_the_next_time_without_reading_the_source(shards: Path, tmp_path: Path) -> None:
    source = TarSource(shards)
    item_lengths(source, "tokens", cache=tmp_path / "new" / "folder")
    (path,) = (tmp_path / "new" / "folder").iterdir()
    found: Any = item_lengths(Unreadable(source), "tokens", cache=path.parent)  # type: ignore[arg-type]
    assert found.values.tolist() == COUNTS
    assert found.sort.tolist() == [1, 0, 3, 4, 2] == Lengths(COUNTS).sort.tolist()
    assert found.table.values.tolist() == [0, 3, 12, 70]
    assert found.table.counts.tolist() == [1, 2, 1, 1]
    again = pickle.loads(pickle.dumps(found))
    assert len(pickle.dumps(found)) < 1000
    assert again == found == Lengths(COUNTS)
    given = item_lengths(source, COUNTS, cache=path.parent)
    assert given == found
    assert len(list(path.parent.iterdir())) == 2


def test_a_damaged_cache_is_written_again(shards: Path, tmp_path: Path) -> None:
    source = TarSource(shards)
    item_lengths(source, "tokens", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    left = tmp_path / f".{path.name}.0123456789abcdef.aside"  # as a killed writer leaves it
    for damaged in (b"", whole[:20], whole[:-1], whole + b"x", bytes([*whole[:-1], whole[-1] ^ 1]), b"x" + whole[1:]):
        path.write_bytes(damaged)
        left.write_bytes(whole[:9])
        assert item_lengths(source, "tokens", cache=tmp_path).values.tolist() == COUNTS
        assert path.read_bytes() == whole
        assert not left.exists()


TRUNCATED = """
import os, sys, tempfile
from pathlib import Path
import numpy as np
import penstock as ps

source = ps.ArraySource({"n": np.arange(50_000) % 90 + 10})
lengths = ps.item_lengths(source, by="n", cache=tempfile.mkdtemp())
(path,) = Path(lengths._open[1][0]).parent.iterdir()
plans = {
    "TokenBudget": ps.TokenBudget(source.index, lengths, 400),
    "Bucketed": ps.Bucketed(source.index, lengths, 8),
    "Packed": ps.Packed(source.index, lengths, 200, 2),
}
whole = [plan.epoch(0).draw(3).items.tolist() for plan in plans.values()]
os.truncate(path, 4096)  # pages that were mapped are gone: reading them ends a process with SIGBUS
for name, plan in plans.items():
    try:
        plan.epoch(0).draw(3)
    except ps.ReadError as error:
        print(name, str(path) in str(error), "truncated" in str(error))
lengths = ps.item_lengths(source, by="n", cache=path.parent)  # reads the source again
plan = ps.TokenBudget(source.index, lengths, 400)
print(plan.epoch(0).draw(3).items.tolist() == whole[0])
"""


def test_a_cache_that_is_truncated_while_it_is_mapped_is_a_read_error_and_not_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", TRUNCATED], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["TokenBudget True True", "Bucketed True True", "Packed True True", "True"]


def test_a_cache_that_cannot_be_written_is_an_error(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="Could not create the folder"):
        item_lengths(TarSource(shards), "tokens", cache=tmp_path / "file" / "folder")
    os.mkfifo(tmp_path / f"lengths-{Lengths(COUNTS).digest}.bin")  # never opened
    assert item_lengths(TarSource(shards), COUNTS, cache=tmp_path).values.tolist() == COUNTS
