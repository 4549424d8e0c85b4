"""Shards of a URL give the same items, bit for bit, as the folder that they were copied from."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
from penstock_remote import Endpoint
from penstock_source_suite import Case, ShortSuite, same
from penstock_test_shards import Sample, TarSuite, cases_of, check_in_a_spawned_process, uniform, write

from penstock import DamageError, OptionError, Source, SourceError, Span, TarSource
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.protocol import ObjectInfo
from penstock.shard.index_tars import index_archives
from penstock.source.lengths import has_varying_arrays, item_lengths
from tests.source.tar import test_others, test_source

KINDS = {**test_source.KINDS, **test_others.KINDS}
SUITE = ("ragged", "irregular metadata", "bz2", "foreign orders")


def copy_to(endpoint: Endpoint, folder: Path) -> Endpoint:
    """Copy a folder to a server, under a name of its own."""
    there = endpoint.below(f"{folder.parent.name}-{folder.name}")
    shutil.copytree(folder, there.folder, dirs_exist_ok=True)
    return there


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, s3_server: Endpoint) -> Callable[[str], Case]:
    def open_source(name: str, folder: Path, options: Sample, offset: int) -> Source:
        there = copy_to(s3_server, folder)
        return TarSource(str(there.url), store=there.options, **options)

    return cases_of({name: KINDS[name] for name in SUITE}, tmp_path_factory, open_source)


class TestRemoteTarSource(ShortSuite):
    suite = TarSuite

    @pytest.fixture(params=SUITE)
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
        return cases(request.param)


def test_a_process_that_is_spawned_reads_the_same(cases: Callable[[str], Case]) -> None:
    check_in_a_spawned_process(cases("ragged"))


def read_some(source: TarSource, local: TarSource) -> None:
    """Check neighbours, scattered items and repeats, announced and released or not."""
    n_items = len(local.index)
    rng = np.random.default_rng(n_items)
    for number in range(4):
        items = rng.integers(0, n_items, 7) if number % 2 else np.arange(number, min(n_items, number + 5))
        if number > 1:
            source.prepare(items)
        wanted, found = local.take(items), source.take(items)
        assert list(found) == list(wanted)
        for name in wanted:
            for row in range(len(items)):
                assert same(found[name][row], wanted[name][row]), (name, items[row])
        if number > 0:
            source.release(items)
    assert [source.key_of(item) for item in range(n_items)] == [local.key_of(item) for item in range(n_items)]


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_those_of_the_folder(kind: str, tmp_path: Path, s3: Endpoint, http_files: Endpoint) -> None:
    _, _, options = KINDS[kind](tmp_path / "set", 0)
    options = {**options, **({"quarantine": tmp_path / "bad.jsonl"} if "on_error" in options else {})}
    local = TarSource(tmp_path / "set", **options)
    for endpoint, more in ((s3, {}), (http_files, {}), (s3, {"cache": tmp_path / "cache"})):
        there = copy_to(endpoint, tmp_path / "set")
        with_cache = {**more, **({"cache_bytes": 1 << 24} if more else {})}
        source = TarSource(str(there.url), store=endpoint.options, **options, **with_cache)
        assert source.index == local.index
        assert source.manifest.fingerprint == local.manifest.fingerprint
        read_some(source, local)
        again = pickle.loads(pickle.dumps(source))
        assert again.path == source.path
        source.close()


def test_a_source_says_what_it_has_transferred(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", uniform(0))
    source = TarSource(str(copy_to(s3, tmp_path / "set").url), store=s3.options)
    assert (source.is_remote, source.cache_bytes, str(source.url)) == (True, 0, str(source.manifest.folder))
    source.take(np.arange(23))
    assert source.transfers is not None
    assert source.transfers.requests > 0
    local = TarSource(tmp_path / "set")
    assert (local.is_remote, local.cache_bytes, local.url, local.transfers) == (False, 0, None, None)
    assert local.stored_bytes == source.stored_bytes
    assert repr(source) == f"TarSource('{source.url}', 23 items of x, y, metadata)"


@pytest.mark.parametrize(
    "look_up",
    [
        lambda source: source.where("trial >= 0"),
        lambda source: source.columns("trial"),
        lambda source: source.column_names,
        lambda source: item_lengths(source, by="x"),
        lambda source: has_varying_arrays(source, "x"),
        lambda source: source.axis_lengths("x"),
    ],
    ids=["where", "columns", "column_names", "item_lengths", "has_varying_arrays", "axis_lengths"],
)
def test_a_look_up_drops_nothing_that_was_fetched(
    look_up: Callable[[TarSource], Any], tmp_path: Path, s3: Endpoint
) -> None:
    samples = [{"x": np.arange(number + 1), "y": np.arange(3)} for number in range(9)]
    write(tmp_path / "set", samples, [{"trial": number} for number in range(9)], shard_size=4)
    there = copy_to(s3, tmp_path / "set")
    source = TarSource(str(there.url), store=s3.options)
    items = np.arange(9)
    source.take(items)  # in memory until it is released
    look_up(source)
    s3.break_requests({"kind": "status", "status": 403})
    assert [len(x) for x in source.take(items)["x"]] == list(range(1, 10))


def test_the_first_batch_takes_at_most_five_round_trips(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", uniform(0), shard_size=3)
    there = copy_to(s3, tmp_path / "set")
    s3.set_line(latency_seconds=0.5)
    source = TarSource(str(there.url), store=s3.options)
    before, n_together = len(there.log()), s3.most_in_flight()
    s3.set_line()
    assert sorted((method, key) for method, key, *_ in there.log()) == [("GET", "dataset_metadata.json"), ("LIST", "")]
    assert n_together == 2
    source.take(np.arange(0, 23, 3))
    asked = [key for _, key, *_ in there.log()][before:]
    # Two waves: side indexes, then spans; nothing is asked for twice.
    assert sorted(asked) == sorted(f"shard_{n:06d}.tar{end}" for n in range(8) for end in (".index", ""))


def test_a_dataset_that_was_published_after_the_list_was_made_is_complete(
    tmp_path: Path, s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of objects is asked for together with the manifest, and may be older than it."""
    write(tmp_path / "set", uniform(0), shard_size=3)
    there, listed = copy_to(s3, tmp_path / "set"), RemoteFolder.list_folder
    older: list[list[ObjectInfo]] = [[]]
    monkeypatch.setattr(RemoteFolder, "list_folder", lambda folder: older.pop() if older else listed(folder))
    assert len(TarSource(str(there.url), store=s3.options).index) == 23
    (there.folder / "shard_000003.tar").unlink()
    with pytest.raises(DamageError, match=r"shard_000003\.tar"):
        TarSource(str(there.url), store=s3.options)


def test_what_lies_below_a_dataset_is_neither_listed_nor_pinned(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", uniform(0), shard_size=3)
    there = copy_to(s3, tmp_path / "set")
    (there.folder / "notes.txt").write_text("not of the dataset")
    (there.folder / "below").mkdir()
    for number in range(1200):  # more than a server lists in one answer
        (there.folder / "below" / f"{number:04d}").touch()
    source = TarSource(str(there.url), store=s3.options)
    assert [method for method, *_ in there.log()].count("LIST") == 1
    pinned = source._archives._pinned  # type: ignore[union-attr]
    assert sorted(pinned) == ["dataset_metadata.json", *(f"shard_{number:06d}.tar" for number in range(8))]


def wide(n_items: int) -> list[Sample]:
    """Return items of 40 kB of x and 8 bytes of y."""
    return [{"x": np.full(10_000, i, np.int32), "y": np.int64(i)} for i in range(n_items)]


def test_side_indexes_of_what_comes_next_are_asked_for_in_one_round_trip(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", uniform(0), shard_size=3)
    there = copy_to(s3, tmp_path / "set")
    source = TarSource(str(there.url), store=s3.options)
    there.set_line(latency_seconds=0.5)
    source.prepare(np.arange(0, 23, 3))  # waits for the first of them
    asked = [key for _, key, *_ in there.log() if key.endswith(".index")]
    assert sorted(asked) == [f"shard_{number:06d}.tar.index" for number in range(8)]


def test_only_the_fields_that_are_read_are_downloaded(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", wide(40), shard_size=40)
    there = copy_to(s3, tmp_path / "set")
    source = TarSource(str(there.url), store=s3.options, fields=["y"])
    items = np.array([3, 11, 17, 25, 33])
    assert source.take(items)["y"].tolist() == items.tolist()
    assert there.n_bytes(key="shard_000000.tar") < 5 * 4096


def test_scattered_items_are_downloaded_alone_and_neighbours_by_spans(
    tmp_path: Path, s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteFolder, "memory_bytes", 1 << 20)  # the dataset does not fit
    samples = [{"x": np.full(1000, i, np.int32)} for i in range(600)]
    write(tmp_path / "set", samples, shard_size=600)
    there = copy_to(s3, tmp_path / "set")
    scattered = TarSource(str(there.url), store=s3.options, fields=["x"])
    items = np.arange(0, 600, 60)
    assert scattered.take(items)["x"][:, 0].tolist() == items.tolist()
    assert there.n_bytes(key="shard_000000.tar") < 10 * 8192
    there.reset_counts()
    source = TarSource(str(there.url), store=s3.options, fields=["x"])
    for first in range(0, 600, 50):
        items = np.arange(first, first + 50)
        source.prepare(items)
        assert source.read(Span(first, first + 50))["x"][:, 0].tolist() == items.tolist()
        source.release(items)
    size = (there.folder / "shard_000000.tar").stat().st_size
    assert size * 0.99 < there.n_bytes(key="shard_000000.tar") <= size
    assert there.n_requests(key="shard_000000.tar") <= 12


def test_patterns_and_manifests_are_found_at_urls(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", uniform(0))
    for name in ("dataset_metadata.json", *(f"shard_{n:06d}.tar.index" for n in range(6))):
        (tmp_path / "set" / name).unlink()
    index_archives(tmp_path / "set" / "shard_{000000..000003}.tar")
    there = copy_to(s3, tmp_path / "set")
    for name in ("shard_{000000..000003}.tar", "shard_{000000..000003}.tar.metadata.json"):
        assert len(TarSource(str(there.url / name), store=s3.options).index) == 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "No shards found: there is nothing at s3://bucket/"),
        ("tars", "which holds 1 archive .a.tar.. Run `penstock index s3://bucket/"),
        ("index", "it has neither a manifest"),
        ("other", "it has neither a manifest"),
    ],
)
def test_a_url_without_a_dataset_says_what_is_there(name: str, message: str, tmp_path: Path, s3: Endpoint) -> None:
    there = s3.below(f"{tmp_path.name}-{name}")
    if name != "nothing":
        (there.folder / {"tars": "a.tar", "index": "a.tar.index"}.get(name, "a.txt")).write_bytes(b"a")
    with pytest.raises(SourceError, match=message):
        TarSource(str(there.url), store=s3.options)


def test_a_web_server_without_a_dataset_says_what_to_do(tmp_path: Path, http_files: Endpoint) -> None:
    there = http_files.below(tmp_path.name)
    with pytest.raises(SourceError, match=r"there is no dataset_metadata.json. If there are tar archives, index them"):
        TarSource(str(there.url))


def test_options_of_urls_are_refused_for_folders(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0))
    with pytest.raises(OptionError, match="cache"):
        TarSource(tmp_path / "set", cache=tmp_path / "cache", cache_bytes=1 << 20)


def test_bad_items_of_a_url_are_listed_on_this_machine(tmp_path: Path, s3: Endpoint) -> None:
    write(tmp_path / "set", uniform(0))
    there = copy_to(s3, tmp_path / "set")
    options: dict[str, Any] = {"store": s3.options, "on_error": "substitute"}
    with pytest.raises(OptionError, match=r"quarantine=\.\.\., or use cache"):
        TarSource(str(there.url), **options)
    source = TarSource(str(there.url), **options, quarantine=tmp_path / "bad.jsonl")
    assert source.quarantine == tmp_path / "bad.jsonl"
    assert penstock_test_shards.read_quarantine(tmp_path) == []
