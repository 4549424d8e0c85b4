"""The orders whose hashes are kept, and the loaders whose states are: as they were made then, and are made today."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from parts_compatibility import batches, cell, numbered, plain

import penstock as ps

# -- orders ------------------------------------------------------------------------------------------------------------

LABELS = ["rare"] * 5 + ["common"] * 32


@cache
def plans() -> dict[str, Any]:
    """Return a plan of every order, over chunks of different sizes."""
    index = ps.Index.from_sizes([4, 7, 3, 6, 9, 8])
    orders: dict[str, Any] = {
        "sequential": ps.Sequential(),
        "shuffle": ps.Shuffle(),
        "window": ps.WindowShuffle(2),
        "window, chunks in place": ps.WindowShuffle(3, permute_chunks=False),
        "window, items in place": ps.WindowShuffle(2, permute_items=False),
        "window, not held": ps.WindowShuffle(2, held=False),
        "random chunks": ps.RandomChunks(5),
        "random chunks, aligned": ps.RandomChunks(6, count=7, align=3, shuffle=True),
        "subset": ps.Subset(20),
        "subset, near": ps.Subset(20, near=4, window=2),
        "balanced": ps.Balanced(LABELS),
        "balanced, weighted": ps.Balanced(LABELS, weights={"rare": 0.25, "common": 0.75}, length=50),
        "balanced spans": ps.BalancedSpans((0, 5, 30), (0.5, 0.25, 0.25), 40),
        "listed": ps.Listed([30, 2, 2, 17, 5, 36, 1, 0, 9]),
    }
    found: dict[str, Any] = {}
    for name, order in orders.items():
        found[name] = ps.Plan(index, order, batch_size=4, seed=11, tail="short")
        found[f"two lanes: {name}"] = ps.Plan(index, order, batch_size=3, seed=2**40, lanes=2, tail="pad")
        found[f"segments: {name}"] = ps.Segments(ps.Plan(index, order, batch_size=4, seed=11, tail="drop"), 3)
    found["selected"] = ps.Plan(index.select(range(0, 37, 2)), ps.WindowShuffle(2), batch_size=4, seed=11, tail="drop")
    found["one after the other"] = ps.Plan(
        ps.Index.concat([index, ps.Index.uniform(10, 4, identity="x")]),
        ps.WindowShuffle(3),
        batch_size=4,
        seed=11,
        tail="drop",
    )
    found["segments of a pass"] = ps.Segments(ps.Plan(index, ps.Shuffle(), batch_size=4, seed=11, tail="short"), 3)
    return found


def described(plan: Any) -> dict[str, Any]:
    """Return what stands for an order: its hashes, and its beginning."""
    draws = [plan.epoch(epoch).draw(batch).items.tolist() for epoch, batch in ((0, 0), (0, 1), (5, 0))]
    hashes = [plan.order_hash(epoch) for epoch in range(3)]
    return {"hashes": hashes, "batches": draws}


# -- states ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A loader, of which a state was saved."""

    make: Callable[[], Any]
    stream: Callable[[Any], Iterator[Any]]
    """What it gives, epoch after epoch."""

    before: int
    """What was given before the state was saved."""

    after: int = 12
    """What is compared of what follows."""

    again: Callable[[], Any] | None = None
    """How it is made where it goes on; None: as before."""


def state_of(loader: Any) -> Any:
    """Return where a loader stands."""
    return loader.state_dict() if hasattr(loader, "state_dict") else loader.get_state()


def restore(loader: Any, state: Any) -> None:
    """Send a loader to where another one stood."""
    (loader.load_state_dict if hasattr(loader, "load_state_dict") else loader.set_state)(state)


def close(loader: Any) -> None:
    """End what a loader has started."""
    for name in ("close", "cleanup"):
        if hasattr(loader, name):
            getattr(loader, name)()


def patches(loader: Any) -> Iterator[Any]:
    """Yield the numbers of patches, and their voxels."""
    while True:
        for batch in loader:
            # Voxels are counted from 1, and unknown beyond the border.
            yield {"idx": batch["idx"].tolist(), "raw": batch["raw"].nan_to_num(-1).flatten().int().tolist()}


def chunks(sampler: Any) -> Iterator[Any]:
    """Yield the items of one chunk after the other."""
    while True:
        items = list(sampler)
        sampler.advance_chunk()
        yield items


def _windows(start_epoch: Callable[[Any], None]) -> Callable[[Any], Iterator[Any]]:
    def stream(loader: Any) -> Iterator[Any]:
        while True:
            start_epoch(loader)
            while (found := loader.get_next_chunk())[0] is not None:
                # The pipeline's is a pair of the first row and the chunk.
                chunk = found[1] if isinstance(found[0], int) else found
                drawn = torch.randint(0, 1000, (3,), generator=chunk.generator).tolist()
                rows = [chunk[0][0].item(), chunk[0][-1].item()]
                yield {"rows": [chunk.start, chunk.stop], "values": rows, "index": chunk.index, "drawn": drawn}

    return stream


def both_partitions(data: Any) -> Iterator[Any]:
    """Yield a chunk of training and one of validation, in turn."""
    while True:
        for name, loader in data.loaders.items():
            for batch in loader:
                yield [name, plain(batch)]


def module() -> Any:
    """Return a data module whose loaders are made."""

    class Module(ps.ChunkedSequenceDataset):
        def setup(self) -> None:
            self.dataset_train, self.dataset_val = numbered(14).tolist(), (numbered(5) + 100).tolist()

    data = Module(3, 2, seed=9)
    data.setup()
    data.loaders = {"train": data.train_dataloader(batch_size=2), "val": data.val_dataloader(batch_size=2)}
    return data


def _drawn(item: Any, rng: np.random.Generator) -> Any:
    return {**item, "drawn": np.float64(rng.random())}


def source_cases(folder: Path) -> dict[str, Case]:
    """Return a loader over every source, and over every order."""
    array = ps.ArraySource({"x": numbered(20, 2)}, chunk_items=3)
    second = ps.ArraySource({"x": numbered(5, 2) + 40})
    beside = ps.ArraySource({"y": numbered(20, dtype=np.int16)})
    standard = ps.WorkerSafeStandardizedDataset(
        torch.utils.data.TensorDataset(torch.from_numpy(numbered(10, 2)), torch.arange(10)), list(range(9)), 1.0, 2.0
    )
    series = {"v": ("timeseries.zarr", slice(None), 0)}
    sources: dict[str, Any] = {
        "array": lambda: array,
        "selected": lambda: array,
        "concat": lambda: ps.Concat([array, second]),
        "zip": lambda: ps.Zip([array, beside]),
        "take": lambda: ps.Take(array, [7, 2, 2, 19, 11, 5, 0]),
        "numbered": lambda: ps.Numbered(array),
        "tar": lambda: ps.TarSource(folder / "shards/arrays", fields=["number", "x"]),
        "compressed tar": lambda: ps.TarSource(folder / "shards/gz", fields=["number"]),
        "indexed tar": lambda: ps.TarSource(folder / "foreign", fields=["x"]),
        "zarr": lambda: ps.ZarrSource(folder / "simulation", series),
        "audio": lambda: ps.AudioSource(folder / "sound", window_frames=4),
        "dataset": lambda: ps.DatasetSource([{"x": number} for number in range(1, 12)], identity="eleven"),
        "own dataset": lambda: ps.DatasetSource(standard),
        "volume": lambda: cell(folder).volume,
    }

    def made(name: str, order: Any, **options: Any) -> Callable[[], Any]:
        def make() -> Any:
            source = sources[name]()
            index = source.index.select(range(1, 20, 3)) if name == "selected" else source.index
            return ps.Loader(source, ps.Plan(index, order, batch_size=2, seed=3, tail="short"), **options)

        return make

    found = {f"source {name}": Case(made(name, ps.Shuffle()), batches, 2, 4) for name in sources}
    threads = ps.RunOptions(executor="threads")
    found["transform"] = Case(made("array", ps.WindowShuffle(2), transform=_drawn), batches, 13)
    found["threads"] = Case(made("array", ps.WindowShuffle(2), num_workers=2, options=threads), batches, 3)
    return found


def plan_cases() -> dict[str, Case]:
    """Return a loader of every plan, one that goes on in other batches, and one that goes on with more ranks."""
    # Lanes and segments are the same for all orders, whose hashes are kept for all of them.
    kept = ("two lanes: window", "segments: window", "segments: shuffle")
    chosen = {name: plan for name, plan in plans().items() if ": " not in name or name in kept}
    found = {f"plan {name}": Case(_over(plan), batches, 4, 4) for name, plan in chosen.items()}
    source = ps.ArraySource({"x": numbered(37)})

    def loader(batch_size: int, rank: int = 0, size: int = 1) -> Callable[[], Any]:
        plan = ps.Plan(source.index, ps.Shuffle(), batch_size=batch_size, seed=4, tail="drop")
        return lambda: ps.Loader(source, plan, world=ps.World(rank, size))

    found["other batch size"] = Case(loader(4), batches, 3, again=loader(5))
    found["more ranks"] = Case(loader(3), batches, 4, again=loader(3, rank=1, size=2))
    return found


def _over(plan: Any) -> Callable[[], Any]:
    source = ps.ArraySource({"x": numbered(plan.index.n_stored)})
    return lambda: ps.Loader(_Indexed(source, plan.index), plan)


class _Indexed:
    """A source whose items lie in other chunks."""

    def __init__(self, source: Any, index: Any) -> None:
        self.fields, self.read, self.take, self.close = source.fields, source.read, source.take, source.close
        self.index = index


def recipe_cases(folder: Path) -> dict[str, Case]:
    """Return the loaders that have a state of their own."""
    recording = numbered(50, 2)

    def load(start: int, stop: int) -> tuple[Any, Any]:
        return recording[start:stop, :1], recording[start:stop, 1:]

    given = [(0, 5), (20, 31), (7, 9), (40, 50)]
    shards = folder / "shards/arrays"
    seven = numbered(7, dtype=np.int64).tolist()
    return {
        "chunked sampler": Case(lambda: ps.ChunkedSampler(10, 4, seed=1), chunks, 3, 5),
        "chunked loader": Case(lambda: ps.ChunkedDataLoader(seven, 2, 3, seed=1), batches, 4),
        "chunked validation": Case(lambda: ps.ChunkedDataLoader(seven, 2, 3, shuffle=False), batches, 2),
        "chunked audio": Case(
            lambda: ps.ChunkedDataLoader(
                ps.QuantizedAudioDataset(folder / "sound", sample_len=4, drop_last=True), batch_size=2, chunk_size=2
            ),
            batches, 3, 5,
        ),
        "chunked module": Case(module, both_partitions, 7),
        "random chunks": Case(
            lambda: ps.RandomChunkLoader(load, 50, 8, "cpu", seed=6, time_units=2),
            _windows(lambda loader: loader.start_epoch(4)), 6,
        ),
        "partition": Case(
            lambda: ps.RandomChunkLoader(load, 50, 8, "cpu", seed=6, coverage="partition", align=4),
            _windows(lambda loader: loader.start_epoch()), 9,
        ),
        "pipeline": Case(
            lambda: ps.PipelineChunkLoader(load, "cpu", seed=6), _windows(lambda loader: loader.start_epoch(given)), 5
        ),
        "webdataset": Case(lambda: ps.WebDatasetLoader(shards, seed=8, fields=["number"]), batches, 9),
        "webdataset, no shuffle": Case(
            lambda: ps.WebDatasetLoader(shards, shuffle=False, shuffle_shards=True, fields=["number"]), batches, 3
        ),
        "webdataset, compressed": Case(
            lambda: ps.WebDatasetLoader(folder / "shards/gz", buffer_size=2, fields=["number"]), batches, 5
        ),
        "webdataset batches": Case(
            lambda: ps.create_webdataset_dataloader(shards, batch_size=2, num_workers=0, buffer_size=4), batches, 5, 6
        ),
        **_cell_cases(folder),
    }  # fmt: skip


def _cell_cases(folder: Path) -> dict[str, Case]:
    mirror = {"mirror": {"axes": {"x": 0.5, "y": 0.5}}}

    def loader(dataset: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        return lambda: ps.CellMapDataLoader(dataset(), batch_size=2, **options)

    def crops() -> Any:
        return ps.CellMapMultiDataset(datasets=[cell(folder), cell(folder, pad=False)])

    def sampled() -> Any:
        rng = torch.Generator().manual_seed(5)
        return loader(lambda: cell(folder), sampler=torch.utils.data.RandomSampler(range(20), False, 7, rng))()

    numbers = list(range(1, 10))
    return {
        "patches": Case(
            loader(lambda: cell(folder, spatial_transforms=mirror, is_train=True), rng=3), patches, 3, 3
        ),
        "patches, so many": Case(loader(lambda: cell(folder), iterations_per_epoch=4, near=4), patches, 5, 3),
        "patches, more than all": Case(loader(lambda: cell(folder), iterations_per_epoch=80), patches, 3, 3),
        "patches, weighted": Case(
            loader(crops, weighted_sampler=True, iterations_per_epoch=6, rng=4), patches, 7, 3
        ),
        "patches, sampled": Case(sampled, patches, 6, 3),
        "patches, validation": Case(loader(lambda: cell(folder), is_train=False), patches, 2, 3),
        "patches, some": Case(
            loader(lambda: torch.utils.data.Subset(cell(folder), [5, 3, 8, 1, 13]), rng=2), patches, 1, 3
        ),
        "any dataset": Case(loader(lambda: numbers, rng=2), batches, 2, 5),
    }  # fmt: skip


CHANGED = ("other batch size", "more ranks")
"""The loaders that go on otherwise than they began."""


@cache
def cases(folder: Path) -> dict[str, Case]:
    """Return every loader of which a state is saved."""
    return {**source_cases(folder), **plan_cases(), **recipe_cases(folder)}
