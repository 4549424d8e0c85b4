"""Damage of every kind, layouts of shards, and who reads them, a row each: `test_damage` brings them together."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from penstock_test_shards import (
    ALL,
    ITEM_BYTES,
    N_ITEMS,
    SECOND,
    SHARD_SIZE,
    attempt,
    facts,
    flip,
    mix_shards,
    read_quarantine,
    write_items,
)

from penstock import DamageError, TarSource
from penstock.core.errors import PenstockError
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.manifest import MANIFEST
from penstock.shard.side_index import index_name
from penstock.shard.verify import verify_shards

__all__ = ["DAMAGES", "LAYOUTS", "READERS", "Damaged", "owners", "write_layout"]

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
SECOND_INDEX = index_name(SECOND)
OF_SECOND = frozenset({2, 3})
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Damaged:
    """What a damage did to a dataset of six items in three shards."""

    what: str
    bad: frozenset[int] = NOTHING
    """Items that cannot be read any more."""

    doubtful: frozenset[int] = NOTHING
    """Items that are read as they were, or are named as damaged."""

    words: str = ""
    """What the error of reading and the report of `verify` must say."""

    at_open: bool = False
    """Whether the dataset cannot be opened at all."""

    spare: bool = False
    """Whether `verify` may report the second shard, though every item is read as it was."""

    reported: frozenset[str] | None = None
    """The shards that `verify` reports; None: those of the bad items, and no others but those of doubtful ones."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "samples": {},
    "columns": {"layout": "columns"},
    "mixed": {"layout": "columns"},  # the second shard has the layout samples
    "gz": {"compression": "gz"},
    "xz": {"compression": "xz"},
    "bz2": {"compression": "bz2"},
    "columns, gz": {"layout": "columns", "compression": "gz"},
}


def write_layout(layout: str, folder: Path, **options: Any) -> None:
    """Write six items, two in a shard."""
    write_items(folder, **{**LAYOUTS[layout], **options})
    if layout == "mixed":
        others = folder.with_name(f"{folder.name} in samples")
        write_items(others, **options)
        mix_shards(folder, others)
        shutil.rmtree(others)


def owners(folder: Path, fields: tuple[str, ...] = ("x.npy", "y.npy", "metadata.json")) -> dict[int, int]:
    """Return which item of the second shard, in columns, each byte belongs to that holds a row of some fields."""
    index, found = RowIndex.from_bytes((folder / SECOND_INDEX).read_bytes(), SECOND), {}
    for column in index.columns:
        if column.suffix in fields:
            begins, sizes = column.places(np.arange(index.n_items), index.starts)
            for row, (begin, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
                found |= dict.fromkeys(range(begin, begin + size), 2 + row)
    return found


# -- damages: each damages a dataset, says what it did, and mends it ---------------------------------------------------

Damage = Callable[[Path, str], Iterator[Damaged]]


def _places(size: int, count: int) -> range:
    return range(0, size, 1 if SOAK else size // count + 1)


def flip_a_shard(folder: Path, layout: str) -> Iterator[Damaged]:
    """Flip bits of members, headers, padding and the end, whoever they belong to."""
    path = folder / SECOND
    own = owners(folder) if layout == "columns" else {}
    for place in [*_places(path.stat().st_size, 60), *(list(own)[::3] if not SOAK else [])]:
        what = f"bit {place % 8} of byte {place}"
        if layout in ("samples", "mixed"):
            bad = frozenset({2 + place // ITEM_BYTES} if place < SHARD_SIZE * ITEM_BYTES else ())
            change = Damaged(what, bad, words="checksum" if bad else "", reported=frozenset({SECOND}))
        elif layout == "columns":
            change = Damaged(what, frozenset({own[place]} if place in own else ()), spare=place not in own)
        else:
            change = Damaged(what, doubtful=OF_SECOND)
        flip(path, place, place % 8)
        yield change
        flip(path, place, place % 8)


def flip_an_index(folder: Path, layout: str) -> Iterator[Damaged]:
    path = folder / SECOND_INDEX
    for place in _places(path.stat().st_size, 25):
        flip(path, place, place % 8)
        yield Damaged(f"byte {place} of the index", OF_SECOND)
        flip(path, place, place % 8)


def truncate_a_shard(folder: Path, layout: str) -> Iterator[Damaged]:
    path, whole = folder / SECOND, (folder / SECOND).read_bytes()
    size = len(whole)
    lengths = {0, 1, 100, 512, 513, 1023, 1024, 1025, 3000, 3072, size // 2, size - 513, size - 1}
    for length in sorted(length for length in lengths if 0 <= length < size):
        path.write_bytes(whole[:length])
        words = f"truncated: {length} bytes, but {size} were written" if "compression" not in LAYOUTS[layout] else ""
        yield Damaged(f"{length} bytes", OF_SECOND, words=words or "truncated")
        path.write_bytes(whole)


def grow_a_shard(folder: Path, layout: str) -> Iterator[Damaged]:
    whole = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(whole + bytes(512))
    yield Damaged("512 bytes more", OF_SECOND, words="longer than it was written")
    (folder / SECOND).write_bytes(whole)


def _aside(folder: Path, name: str, what: str, make: Callable[[Path], object], change: Damaged) -> Iterator[Damaged]:
    path = folder / name
    path.rename(folder.parent / "aside")
    make(path)
    yield replace(change, what=what)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    (folder.parent / "aside").rename(path)


def remove_a_file(folder: Path, layout: str) -> Iterator[Damaged]:
    gone = Damaged("", OF_SECOND, words="missing|No such file")
    yield from _aside(folder, SECOND, "no shard", lambda path: None, replace(gone, at_open=True))
    yield from _aside(folder, SECOND_INDEX, "no index", lambda path: None, gone)


def put_something_else(folder: Path, layout: str) -> Iterator[Damaged]:
    yield from _aside(folder, SECOND, "a folder", Path.mkdir, Damaged("", OF_SECOND))
    yield from _aside(folder, SECOND, "a FIFO", os.mkfifo, Damaged("", OF_SECOND))
    yield from _aside(folder, SECOND, "an empty file", Path.touch, Damaged("", OF_SECOND, words="truncated"))


def swap_two_shards(folder: Path, layout: str) -> Iterator[Damaged]:
    third = "shard_000002.tar"
    both = Damaged("", frozenset({2, 3, 4, 5}), reported=frozenset({SECOND, third}))
    for suffixes in (("",), (".index",), ("", ".index")):
        for _ in range(2):
            for suffix in suffixes:
                (folder / f"{SECOND}{suffix}").rename(folder.parent / "aside")
                (folder / f"{third}{suffix}").rename(folder / f"{SECOND}{suffix}")
                (folder.parent / "aside").rename(folder / f"{third}{suffix}")
            if not _:
                yield replace(both, what=f"swapped {suffixes}")


def put_a_foreign_shard(folder: Path, layout: str) -> Iterator[Damaged]:
    other = folder.with_name("other")
    write_layout(layout, other, salt=100)
    for suffixes in (("",), ("", ".index")):
        kept = {suffix: (folder / f"{SECOND}{suffix}").read_bytes() for suffix in suffixes}
        for suffix in suffixes:
            shutil.copyfile(other / f"{SECOND}{suffix}", folder / f"{SECOND}{suffix}")
        yield Damaged(f"of another dataset: {suffixes}", OF_SECOND)
        for suffix, content in kept.items():
            (folder / f"{SECOND}{suffix}").write_bytes(content)


def keep_an_older_manifest(folder: Path, layout: str) -> Iterator[Damaged]:
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    write_layout(layout, folder, salt=100, overwrite=True)
    shutil.copyfile(kept / MANIFEST, folder / MANIFEST)
    yield Damaged("a manifest older than its shards", frozenset(range(N_ITEMS)))
    shutil.rmtree(folder)
    kept.rename(folder)


def damage_the_manifest(folder: Path, layout: str) -> Iterator[Damaged]:
    whole = (folder / MANIFEST).read_bytes()
    for content in (b"", whole[:1], whole[:100], whole[:-2], whole.replace(b'"num_samples": 2', b'"num_samples": 3')):
        (folder / MANIFEST).write_bytes(content)
        yield Damaged(f"a manifest of {len(content)} bytes", words=MANIFEST, at_open=True)
    (folder / MANIFEST).write_bytes(whole)


DAMAGES: dict[str, Damage] = {
    "a flipped bit of a shard": flip_a_shard,
    "a flipped bit of an index": flip_an_index,
    "a truncated shard": truncate_a_shard,
    "a shard that grew": grow_a_shard,
    "a missing file": remove_a_file,
    "something else in place of a shard": put_something_else,
    "swapped shards": swap_two_shards,
    "a shard of another dataset": put_a_foreign_shard,
    "an older manifest": keep_an_older_manifest,
    "a damaged manifest": damage_the_manifest,
}

# -- readers -----------------------------------------------------------------------------------------------------------


def shard_of(number: int) -> str:
    return f"shard_{number // SHARD_SIZE:06d}.tar"


def read(folder: Path, change: Damaged) -> None:
    """Every item is as it was, or is named with its shard."""
    source = TarSource(folder)
    for number in range(N_ITEMS):
        found, error = attempt(lambda number=number: facts(source.take(np.array([number]))))
        if error is None:
            assert found == [number]
            assert number not in change.bad, f"item {number} was read"
        else:
            assert (error.shard in (shard_of(number), index_name(shard_of(number))), error.item) == (True, number)
            assert number in change.bad | change.doubtful, str(error)
            if number in change.bad:
                check_words(change, str(error))
    if change.bad:
        _, error = attempt(lambda: source.take(ALL))
        assert error is not None
        assert error.item in change.bad | change.doubtful
    source.close()


def check_words(change: Damaged, said: str) -> None:
    assert any(word in said for word in change.words.split("|")), said


def substitute(folder: Path, change: Damaged) -> None:
    """Items that cannot be read are replaced and listed, and all others are as they were."""
    listed = folder / "quarantine.jsonl"
    if change.bad == set(range(N_ITEMS)):
        _, error = attempt(lambda: TarSource(folder, on_error="substitute").take(ALL))
        assert "no healthy item" in str(error)
    else:
        found = [facts(TarSource(folder, on_error="substitute").take(ALL)) for _ in range(2)]
        assert found[0] == found[1], "always the same substitutes"
        replaced = {number for number, is_now in enumerate(found[0]) if is_now != number}
        assert change.bad <= replaced <= change.bad | change.doubtful
        assert sorted(read_quarantine(folder)) == [(number, shard_of(number)) for number in sorted(replaced)]
    listed.unlink(missing_ok=True)


def verify(folder: Path, change: Damaged) -> None:
    """Every shard that cannot be read is reported, with the items that are bad, and no other."""
    problems = verify_shards(folder)[1]
    named = {problem.shard.removesuffix(".index") for problem in problems}
    if change.reported is not None:
        assert named == change.reported
    else:
        assert {shard_of(number) for number in change.bad} <= named
        assert named <= {shard_of(number) for number in change.bad | change.doubtful} | (
            {SECOND} if change.spare else set()
        )
    assert change.spare or {problem.item for problem in problems} - {None} <= change.bad | change.doubtful
    if change.words:
        check_words(change, " ".join(problem.reason for problem in problems))


def open_it(read_it: Callable[[Path, Damaged], None]) -> Callable[[Path, Damaged], None]:
    """Return a reader that is refused at once if the dataset cannot be opened."""

    def reader(folder: Path, change: Damaged) -> None:
        if not change.at_open or (read_it is verify and change.bad):
            read_it(folder, change)
            return
        try:
            read_it(folder, change)
        except PenstockError as error:
            assert isinstance(error, DamageError)  # noqa: PT017
            check_words(change, str(error))
        else:
            raise AssertionError("it was opened")

    return reader


READERS = {each.__name__: open_it(each) for each in (read, substitute, verify)}
