"""Datasets of tar shards shared by several test files, their expected items, and ways to damage them.

Every value says which item it belongs to. A test file takes a fixture by name: `sets = penstock_test_shards.sets`.
"""

import io
import json
import multiprocessing as mp
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_source_suite import Case, SourceSuite
from penstock_test_parts import positions
from penstock_test_processes import run_isolated

from penstock import DamageError, Loader, LoaderError, RunOptions, Source, Span, TarSource, create_shards_from_arrays
from penstock.recipes.webdataset import WebDatasetLoader, WebDatasetWriter
from penstock.shard.index_tars import index_archives
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.side_index import index_name

Sample = dict[str, Any]
Truth = Callable[[int], Sample]
Kind = Callable[[Path, int], tuple[Truth, int, Sample]]
"""Writes a dataset of one layout, numbered from a start; returns (expected item, item count, source options)."""

# -- writing -----------------------------------------------------------------------------------------------------------


_OPTIONS: dict[str, Any] = {"shard_size": 4}


def write(folder: Path, samples: Sequence[Sample], metadata: Sequence[Sample] | None = None, **options: Any) -> Truth:
    """Write samples; return a function that gives each expected item."""
    options = {**_OPTIONS, **options}
    with WebDatasetWriter(folder, **options) as writer:
        for number, sample in enumerate(samples):
            writer.write_sample(sample, metadata=None if metadata is None else metadata[number])

    def truth(item: int) -> Sample:
        shard, row = divmod(item, options["shard_size"])
        own = {"sample_id": f"sample_{item:09d}", "modalities": list(samples[0])}
        place = {"shard_idx": shard, "sample_idx_in_shard": row}
        return {**samples[item], "metadata": {**own, **place, **(metadata[item] if metadata else {})}}

    return truth


def in_columns(kind: Kind, *, mixed: bool = False) -> Kind:
    """Return a kind whose datasets have the layout "columns"; mixed: every other shard, beside those of samples."""

    def make(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
        _OPTIONS["layout"] = "columns"
        try:
            found = kind(folder, offset)
        finally:
            del _OPTIONS["layout"]
        if mixed:
            kind(folder.with_name(f"{folder.name}-samples"), offset)
            mix_shards(folder, folder.with_name(f"{folder.name}-samples"))
        return found

    return make


def mix_shards(folder: Path, other: Path) -> None:
    """Replace every other shard of a dataset by that of another one with the same items."""
    ours, theirs = (Manifest.read(each / MANIFEST) for each in (folder, other))
    entries = [theirs.shards[n] if n % 2 else entry for n, entry in enumerate(ours.shards)]
    for entry in entries[1::2]:
        for name in (entry.name, index_name(entry.name)):
            shutil.copy(other / name, folder / name)
    manifest = Manifest(folder, ours.fields, tuple(entries), ours.shard_size, ours.array_format)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


def archive(path: Path, samples: Sequence[Mapping[str, bytes]], first: int = 0, **options: Any) -> None:
    """Write a tar with members KEY.SUFFIX, using the standard library."""
    with tarfile.open(path, "w", **options) as tar:
        for number, members in enumerate(samples, start=first):
            for suffix, payload in members.items():
                member = tarfile.TarInfo(f"{options.get('pax_headers', {}).get('prefix', 'item')}{number:05d}.{suffix}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))


def npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=False)
    return stream.getvalue()


def index_folder(folder: Path, **options: Any) -> None:
    manifest, problems = index_archives(folder, **options)
    assert (manifest is not None, problems) == (True, []), problems


def grid(value: int, dtype: str = "f4") -> np.ndarray:
    """Return a small array that differs from any of another shape, order or number."""
    return (value * 100 + np.arange(6).reshape(2, 3)).astype(dtype)


def uniform(offset: int, n: int = 23) -> list[Sample]:
    return [{"x": np.int64(i + offset), "y": grid(i + offset)} for i in range(n)]


# -- what every layout must do -----------------------------------------------------------------------------------------


def _open_source(name: str, folder: Path, options: Sample, offset: int) -> Source:
    return TarSource(folder, **options)


def cases_of(
    kinds: Mapping[str, Kind],
    folders: pytest.TempPathFactory,
    open_source: Callable[[str, Path, Sample, int], Source] = _open_source,
) -> Callable[[str], Case]:
    """Return a function that makes each dataset once."""
    cached: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in cached:
            folder = folders.mktemp("sets")
            truth, n_items, options = kinds[name](folder / "set", 0)
            kinds[name](folder / "other", 1000)
            cached[name] = Case(
                make=lambda: open_source(name, folder / "set", options, 0),
                truth=truth,
                n_items=n_items,
                other=lambda: open_source(name, folder / "other", options, 1000),
            )
        return cached[name]

    return case


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return a function that makes each of the test file's own KINDS once."""
    return cases_of(request.module.KINDS, tmp_path_factory)


class TarSuite(SourceSuite):
    """Tests of shard sources, in addition to those of every source; subclasses define the fixture `case`."""

    def test_returned_values_may_be_modified(self, case: Case, source: Source) -> None:
        # Objects are decoded again for every reader; no other reader sees the changes.
        for block in (source.read(Span(0, 4)), source.take(np.arange(4))):
            for array in block.values():
                for value in array if array.dtype.hasobject else ():
                    if isinstance(value, np.ndarray):
                        value[...] = np.zeros((), value.dtype)
                    elif isinstance(value, dict):
                        value.clear()
                array[...] = None if array.dtype.hasobject else np.zeros((), array.dtype)
        self.check(case, source.read(Span(0, 4)), range(4))

    def test_a_process_forked_between_reads_reads_independently(self, case: Case, source: Source) -> None:
        source.take(np.arange(3))

        def read_all(sending: Any) -> None:
            try:
                self.check(case, source.take(np.arange(case.n_items)[::-1]), range(case.n_items - 1, -1, -1))
                sending.send("equal")
            except BaseException as error:
                sending.send(repr(error))

        receiving, sending = mp.Pipe(duplex=False)
        child = mp.get_context("fork").Process(target=read_all, args=(sending,))
        child.start()
        self.check(case, source.read(Span(0, case.n_items)), range(case.n_items))
        assert receiving.poll(120), "the process that was forked hangs"
        found = receiving.recv()
        assert found == "equal", found
        child.join()

    def test_noncontiguous_output_arrays_are_filled(self, case: Case, source: Source) -> None:
        fixed = {name: field for name, field in source.fields.items() if field.item_bytes is not None}
        if not fixed:
            pytest.skip("no field of fixed shape")
        room = {name: np.zeros((6, *field.shape), field.dtype) for name, field in fixed.items()}
        out = {name: array[::2] for name, array in room.items()}
        block = source.take(np.array([4, 0, 4]), out)
        assert all(block[name] is out[name] for name in out), "the given output arrays are used"
        self.check(case, block, [4, 0, 4])
        for name, array in room.items():
            assert array[1::2].tobytes() == np.zeros_like(array[1::2]).tobytes(), (
                f"{name!r} was written outside its output"
            )


def check_in_a_spawned_process(case: Case) -> None:
    """Check that this process and a spawned one read the same items."""
    source = case.make()
    items = np.array([case.n_items - 1, 0, 5, 5])
    SourceSuite.check(case, source.take(items), items.tolist())
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        SourceSuite.check(case, pool.submit(source.take, items).result(300), items.tolist())
    source.close()


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def member_places(path: Path) -> dict[str, tuple[int, int]]:
    """Return offset and size of the payload of each member."""
    with tarfile.open(path) as tar:
        return {member.name: (member.offset_data, member.size) for member in tar}


def flip_member(folder: Path, member: str) -> None:
    """Change one bit of the last byte of a member, in the shard that has it."""
    for shard in sorted(folder.glob("*.tar")):
        offset, size = member_places(shard).get(member, (0, 0))
        if size:
            flip(shard, offset + size - 1)
            return
    raise AssertionError(f"{member} is in no shard")


def attempt(take: Callable[[], Any]) -> tuple[Any, DamageError | None]:
    """Return the result, or None and the error."""
    try:
        return take(), None
    except DamageError as error:
        return None, error


# -- six items in three shards, to be damaged --------------------------------------------------------------------------

N_ITEMS, SHARD_SIZE = 6, 2
ALL = np.arange(N_ITEMS)
ITEM_BYTES = 3 * 1024  # three members: a header, and a payload of one tar block
SECOND = "shard_000001.tar"
RUNS = {
    "inline": (0, None),
    "threads": (2, RunOptions(executor="threads")),
    "processes": (2, RunOptions(executor="processes", start_method="fork")),
}


def item(number: int) -> Sample:
    """Return x = (i, i + 1/2, …) of fixed shape, and y of a length that varies."""
    return {"x": np.arange(4, dtype=np.float32) / 2 + number, "y": np.full(number % 3, number, np.int16)}


def write_items(folder: Path, n_items: int = N_ITEMS, *, salt: int = 0, **options: Any) -> None:
    """Write items whose numbers begin at `salt`."""
    numbers = range(salt, salt + n_items)
    options = {"shard_size": SHARD_SIZE, **options}
    write(folder, [item(number) for number in numbers], [{"number": number} for number in numbers], **options)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets that are copied for each test: one for each compression, and one of other items."""
    folder = tmp_path_factory.mktemp("originals")
    for compression in ("none", "gz", "xz"):
        write_items(folder / compression, compression=compression)
    write_items(folder / "other", salt=100)
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals / "none", tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture(params=["gz", "xz"])
def packed(request: pytest.FixtureRequest, originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals / request.param, tmp_path / "set")
    return tmp_path / "set"


def facts(block: Any) -> list[Any]:
    """Return the number of each item of a block, after checking that all of its fields agree on it."""
    numbers = [about["number"] for about in block["metadata"]]
    for number, x, y in zip(numbers, block["x"], block["y"], strict=True):
        assert x.tobytes() == item(number)["x"].tobytes(), "a torn item"
        assert y.tobytes() == item(number)["y"].tobytes(), "a torn item"
    return numbers


def first_values(batches: Any) -> list[list[float]]:
    """Return the first value of x of each item, which is its number, batch by batch."""
    return [batch["x"][:, 0].tolist() for batch in batches]


def read_quarantine(folder: Path) -> list[tuple[int, str]]:
    path = folder / "quarantine.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(entry["item"], entry["shard"]) for entry in entries]


def damage_of(source: TarSource, items: Any = ALL) -> DamageError:
    with pytest.raises(DamageError) as caught:
        source.take(np.asarray(items))
    return caught.value


# -- WebDataset loaders ------------------------------------------------------------------------------------------------

# The four kinds of order: a shuffle window of runs, all samples at once, shards only, storage order.
ORDERS: dict[str, dict[str, Any]] = {
    "window": {"buffer_size": 4},
    "all": {"buffer_size": 1000},
    "shards": {"shuffle": False, "shuffle_shards": True},
    "storage": {"shuffle": False},
}
OURS = {
    "no workers": (0, RunOptions()),
    "2 threads": (2, RunOptions(executor="threads")),
    "2 persistent processes": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
    "3 processes per epoch": (3, RunOptions(executor="processes", start_method="fork")),
}


def ours(folder: Path, kind: str, batch_size: int = 4, **options: Any) -> Loader:
    """Return the loader of `create_webdataset_dataloader`, run by the given executor."""
    dataset, (workers, run) = WebDatasetLoader(folder, **options), OURS[kind]
    return Loader(dataset.source, dataset.plan(batch_size), num_workers=workers, options=run)


@pytest.fixture(scope="module")
def sets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes each dataset once: `positions`, by default N of them in shards of SHARD."""
    cached: dict[Any, Path] = {}

    def write_once(
        n: int = request.module.N, shard_size: int = request.module.SHARD, offset: int = 0, **options: Any
    ) -> Path:
        key = (n, shard_size, offset, tuple(options.items()))
        if key not in cached:
            cached[key] = tmp_path_factory.mktemp("set")
            arrays = {name: array + offset for name, array in positions(n).items()}
            create_shards_from_arrays(cached[key], arrays, shard_size=shard_size, **options)
        return cached[key]

    return write_once


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the environment of a launcher, from which loaders take their rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def xs(samples: Any) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def flat(batches: Any) -> list[int]:
    return [x for batch in batches for x in batch["x"].tolist()]


def error_in_torchs_worker(dataset: Any) -> str:
    """Return the error of a dataset that one of torch's workers reads, in a process of its own."""
    kept = []

    def outcome() -> str:
        batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
        kept.append(batches)  # torch waits for workers that raised; isolated() does not
        try:
            return f"delivered {len(list(batches))}"
        except LoaderError as error:
            return str(error)

    return str(run_isolated(outcome))
