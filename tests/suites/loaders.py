"""Everything with a position in the data, a row each: `test_loaders` says what all of them must do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from penstock_cellmap_parts import cell, write_cell
from penstock_test_parts import Numbers, numbered_source, positions, to_plain, with_noise
from torch.utils.data import RandomSampler, SequentialSampler, Subset

import penstock as ps
from penstock import Loader, Plan, RunOptions, Segments, Sequential, Shuffle, WindowShuffle, World
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.sampling import ClassBalancedSampler
from penstock.recipes.chunked.loader import ChunkedDataLoader, ChunkedSampler
from penstock.recipes.streams import PipelineChunkLoader, RandomChunkLoader, sample_batch_within_chunk
from penstock.recipes.trainers.feed import Feed
from penstock.recipes.webdataset import ResumableWebDatasetLoader, WebDatasetLoader
from penstock.transform.noise import GaussianNoise
from tests.laws.shards import Stored, make_source

__all__ = ["LOADERS", "Batch", "LoaderCase", "split_items"]

Batch = list[Any]
THREADS = RunOptions(executor="threads", prefetch=3)
FORK = RunOptions(executor="processes", start_method="fork", persistent=True)
WORKERS = ({"num_workers": 3, "options": THREADS}, {"num_workers": 2, "options": FORK})


def split_items(batch: Any) -> Batch:
    """Return the items of a batch with all their fields, bit for bit, without padding."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    fields = to_plain(batch)
    kept = fields.pop("mask", None)
    items = [list(values) for values in zip(*fields.values(), strict=True)]
    return items if kept is None else [item for item, keep in zip(items, kept, strict=True) if keep]


def _iterate(loader: Any) -> Iterator[Batch]:
    return (split_items(batch) for batch in loader)


@dataclass(frozen=True)
class LoaderCase:
    """A loader whose epochs have 12 full batches of 2 items, or as many as it can."""

    make: Callable[..., Any]
    """Makes it, at its beginning, with the options of the fields below."""

    foreign: Mapping[str, Mapping[str, Any]]
    """Options of loaders whose states must be refused, by the words of the error."""

    workers: Sequence[Mapping[str, Any]] = ()
    """Options that must not change what is delivered: workers, executors, batches read ahead."""

    ranks: bool = False
    """Whether it takes `world`."""

    batch_size: Literal["any", "refused"] | None = None
    """Whether a state can be resumed with batches of 3; None: it takes no `batch_size`."""

    epoch: Callable[[Any], Iterator[Batch]] = field(default=_iterate)
    """Yields the rest of the current epoch, or the next one."""

    set_epoch: Callable[[Any, int], None] | None = None
    resumes_after_break: bool = False
    """Whether the iteration after a break yields the rest of the epoch; False: the next one."""

    rewinds: bool = True
    """Whether a loader that is further on can return to an earlier state."""

    counts_batches: bool = True
    """Whether `len()` is the number of batches in an epoch."""

    damageable: Sequence[str] = ()
    """Keys without which a state is refused; all if empty."""

    ends: Literal["close", "cleanup", "end_workers"] | None = "close"
    """The method that ends its threads and processes, if it can have any."""

    reopens: bool = False
    """Whether it can be iterated again after that."""

    pickles: bool = False
    """Whether a copy by pickle goes on where the loader stands; False: pickling it is refused."""


# -- Loader over every kind of plan, and what trainers get in its place ------------------------------------------------


def loader_of(plan: Callable[..., Any], n_items: int) -> Callable[..., Loader]:
    def make(*, items: int = n_items, seed: int = 1, batch_size: int = 2, order: Any = None, **options: Any) -> Loader:
        source = numbered_source(items, chunk=4)
        orders = {} if order is None else {"order": order}
        return Loader(source, plan(source.index, batch_size, seed, **orders), transform=with_noise, **options)

    return make


def shuffled(index: Any, batch_size: int, seed: int, order: Any = Shuffle()) -> Plan:  # noqa: B008
    return Plan(index, order, batch_size, seed, tail="short")


def lanes(index: Any, batch_size: int, seed: int, order: Any = WindowShuffle(2)) -> Plan:  # noqa: B008
    return Plan(index, order, batch_size, seed, lanes=2, tail="pad")


def cycling(index: Any, batch_size: int, seed: int, order: Any = WindowShuffle(2)) -> Segments:  # noqa: B008
    return Segments(Plan(index, order, batch_size, seed), 12)


def of_a_pass(index: Any, batch_size: int, seed: int, order: Any = Shuffle()) -> Segments:  # noqa: B008
    return Segments(Plan(index, order, batch_size, seed, tail="short"), 12)


PLANS: dict[str, tuple[Callable[..., Any], int, Any]] = {
    "plan": (shuffled, 24, "any"),
    "windows and lanes": (lanes, 24, None),
    "segments of a stream": (cycling, 30, "refused"),
    "segments of a pass": (of_a_pass, 72, "refused"),
}
FOREIGN = {
    "the seed changed from 2 to 1": {"seed": 2},
    "the order changed": {"order": Sequential()},
    "the number of items changed from 26 to": {"items": 26},
}


def plan_case(kind: str, root: Path) -> LoaderCase:
    plan, items, batch_size = PLANS[kind]
    make = loader_of(plan, items)
    return LoaderCase(make, FOREIGN, WORKERS, ranks=True, batch_size=batch_size, set_epoch=Loader.set_epoch)


def shard_case(stored: Stored, order: Any, root: Path) -> LoaderCase:
    """Shards in the layout columns: what the other layout gives, from other bytes."""

    def make(
        *, items: int = 24, seed: int = 1, batch_size: int = 2, layout: Stored = stored, order: Any = order, **more: Any
    ) -> Loader:
        source = make_source(layout, items, 9)
        return Loader(source, Plan(source.index, order, batch_size, seed, tail="short"), **more)

    foreign = {**FOREIGN, "the data": {"layout": "samples"}}
    return LoaderCase(make, foreign, WORKERS, ranks=True, batch_size="any", set_epoch=Loader.set_epoch)


def double(item: Any) -> Any:
    return {**item, "twice": 2 * item["x"]}


def chain_case(root: Path) -> LoaderCase:
    def make(*, first: int = 0, seed: int = 5, batch_size: int = 2, workers: int = 0, world: Any = None) -> Any:
        data = ps.open({"x": np.arange(24) + first, "label": np.arange(24) % 3})
        return data.shuffle(seed).map(double).map(with_noise).batch(batch_size).loader(workers, world=world)

    foreign = {"the data": {"first": 1}, "the seed": {"seed": 6}}
    return LoaderCase(make, foreign, [{"workers": 2}], ranks=True, batch_size="any", set_epoch=Loader.set_epoch)


def mixture_case(root: Path) -> LoaderCase:
    def make(*, weight: int = 1, seed: int = 5, batch_size: int = 2, **options: Any) -> Loader:
        parts = {"a": numbered_source(8), "b": numbered_source(16, chunk=4)}
        mixture = ps.Mixture(parts, weights={"a": weight, "b": 2}, stop="all")
        return Loader(mixture, Plan(mixture.index, mixture.order, batch_size, seed, tail="short"), **options)

    foreign = {"the order changed": {"weight": 2}, "the seed changed from 6 to 5": {"seed": 6}}
    return LoaderCase(make, foreign, WORKERS, ranks=True, batch_size="any", set_epoch=Loader.set_epoch)


def exactly_as_many(feed: Feed) -> Iterator[Batch]:
    """Yield the batches that a trainer takes: it knows how many an epoch has, and asks for no more."""
    return (split_items(batch) for batch in islice(feed, len(feed)))


def feed_case(kind: str, root: Path) -> LoaderCase:
    chunked = kind == "chunks"
    of_plan = None if chunked else loader_of(shuffled if kind == "a pass" else cycling, 24)

    def make(*, items: int = 24, batch_size: int = 2, seed: int = 1, **options: Any) -> Feed:
        if of_plan is None:
            loader: Any = ChunkedDataLoader(Numbers(items), batch_size, 12, seed=seed, **options)
        else:
            loader = of_plan(items=items, batch_size=batch_size, seed=seed, **options)
        return Feed(loader, options.get("world", World()).size)

    return LoaderCase(
        make,
        {"the seed changed from 2 to 1": {"seed": 2}, "the number of items changed from 26": {"items": 26}},
        ({"num_workers": 1} if chunked else {"num_workers": 2, "options": THREADS},),
        ranks=True,
        batch_size="any" if kind == "a pass" else "refused",
        epoch=exactly_as_many,
        set_epoch=Feed.go_to,
        resumes_after_break=chunked,
        ends=None,
        pickles=chunked,
    )


# -- shards by the names of the documents ------------------------------------------------------------------------------


@cache
def shards(root: Path, n_items: int, offset: int = 0, compression: Any = "none") -> Path:
    """Return a dataset of `positions` in shards of 4 items."""
    arrays = {name: array + offset for name, array in positions(n_items).items()}
    folder = root / f"shards {n_items} {offset} {compression}"
    ps.create_shards_from_arrays(folder, arrays, shard_size=4, compression=compression, show_progress=False)
    return folder


def on_rank(world: World | None, make: Callable[[], Any]) -> Any:
    """Return what is made in the environment of a rank, as a launcher sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        if world is not None:
            patch.setenv("RANK", str(world.rank))
            patch.setenv("WORLD_SIZE", str(world.size))
        return make()


def samples(loader: WebDatasetLoader) -> Iterator[Batch]:
    """Yield samples; a batch is one of them."""
    return ([int(sample["x"])] for sample in loader)


def webdataset_case(kind: type[WebDatasetLoader], compression: str, root: Path) -> LoaderCase:
    folder = shards(root, 12, 0, compression)

    def make(*, data: Path = folder, world: World | None = None, **options: Any) -> WebDatasetLoader:
        return on_rank(world, lambda: kind(data, **options))

    return LoaderCase(
        make,
        {
            "the seed changed from 7 to 42": {"seed": 7},
            "the order changed": {"buffer_size": 4},
            "the data .* changed": {"data": shards(root, 12, 1, compression)},
            "number of items changed from 8": {"shard_pattern": "shard_00000[01].tar"},
        },
        ({"max_workers": 2},),
        ranks=True,
        epoch=samples,
        damageable=("epoch", "batch", "origin", "plan"),
        pickles=True,
    )


def create_case(root: Path) -> LoaderCase:
    folder = shards(root, 24)

    def make(*, data: Path = folder, world: World | None = None, **options: Any) -> Loader:
        options = {"batch_size": 2, "num_workers": 0, **options}
        return on_rank(world, lambda: ps.create_webdataset_dataloader(data, **options))

    return LoaderCase(
        make,
        {
            "the seed changed from 7 to 42": {"seed": 7},
            "the order changed": {"shuffle": False},
            "the data .* changed": {"data": shards(root, 24, 1)},
        },
        ({"num_workers": 2, "prefetch_factor": 3},),
        ranks=True,
        batch_size="any",
        epoch=lambda loader: (split_items({"x": batch["x"]}) for batch in loader),
        set_epoch=Loader.set_epoch,
    )


# -- patches of volumes ------------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "all patches": lambda dataset: {"dataset": Subset(dataset, range(400, 1600, 150))},  # 8 of them
    "some patches": lambda dataset: {"iterations_per_epoch": 4},
    "a sampler with a generator": lambda dataset: {
        "sampler": RandomSampler(dataset, num_samples=8, generator=torch.Generator().manual_seed(4))
    },
    "a sampler with epochs": lambda dataset: {"sampler": ClassBalancedSampler(dataset, 8)},
    "a function that makes samplers": lambda dataset: {"sampler": lambda: SequentialSampler(range(8))},
}


@cache
def cell_folder(root: Path) -> Path:
    folder = root / "cell"
    folder.mkdir()
    write_cell(folder)
    return folder


@cache
def augmented(folder: Path, rng: int) -> Any:
    spatial = {"mirror": {"axes": {"x": 0.5, "y": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}
    noise = GaussianNoise(std=0.1)
    return cell(folder, is_train=True, spatial_transforms=spatial, raw_value_transforms=noise, rng=rng)


def patches(loader: CellMapDataLoader) -> Iterator[Batch]:
    for batch in loader:
        fields = [value.numpy() for name, value in batch.items() if name != "idx"]
        yield [[item, *(field[row].tobytes() for field in fields)] for row, item in enumerate(batch["idx"].tolist())]


def cell_case(kind: str, root: Path) -> LoaderCase:
    def make(*, rng: int = 3, **options: Any) -> CellMapDataLoader:
        dataset = augmented(cell_folder(root), rng)
        return CellMapDataLoader(**{"dataset": dataset, "batch_size": 2, **SAMPLERS[kind](dataset), **options})

    other_order = {"sampler": [3, 1, 2, 0], "iterations_per_epoch": None}
    forked = [{"num_workers": 2, "multiprocessing_context": "fork"}] if kind == "all patches" else []
    return LoaderCase(
        make,
        {"the seed changed from 5 to 3": {"rng": 5}, "the order changed": other_order},
        ({"num_workers": 1}, *forked),
        # The number of patches that `iterations_per_epoch` asks for depends on the batch size.
        batch_size=None if kind == "some patches" else "any",
        epoch=patches,
        rewinds=kind != "a sampler with a generator",
        reopens=True,
    )


# -- chunks and streams ------------------------------------------------------------------------------------------------


def chunked_case(shuffle: bool, root: Path) -> LoaderCase:
    def make(
        *, items: int = 30 if shuffle else 72, batch_size: int = 2, chunk_size: int = 12, **options: Any
    ) -> ChunkedDataLoader:
        options = {"seed": 1, "shuffle": shuffle, **options}
        return ChunkedDataLoader(Numbers(items), batch_size, chunk_size, **options)

    return LoaderCase(
        make,
        {
            "the seed changed from 2 to 1": {"seed": 2},
            "the order changed": {"shuffle": not shuffle},
            "the number of items changed from 26": {"items": 26},
            "the segment length": {"chunk_size": 4},
        },
        ({"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True},),
        ranks=True,
        batch_size="refused",
        set_epoch=ChunkedDataLoader.set_chunk,
        resumes_after_break=True,
        ends="end_workers",
        reopens=True,
        pickles=True,
    )


def whole_chunks(sampler: ChunkedSampler) -> Iterator[Batch]:
    """Yield the one batch of an epoch: the sampler counts whole chunks, its loader counts batches."""
    items = list(sampler)
    sampler.advance_chunk()
    yield items


def sampler_case(root: Path) -> LoaderCase:
    def make(*, items: int = 30, chunk: int = 8, **options: Any) -> ChunkedSampler:
        return ChunkedSampler(items, chunk, **{"seed": 1, **options})

    return LoaderCase(
        make,
        {
            "the seed changed from 2 to 1": {"seed": 2},
            "the order changed": {"shuffle": False},
            "the number of items changed from 26": {"items": 26},
            "the segment length": {"chunk": 4},
        },
        epoch=whole_chunks,
        set_epoch=ChunkedSampler.set_chunk,
        counts_batches=False,
        ends=None,
        pickles=True,
    )


STREAMS: dict[str, dict[str, Any]] = {
    "random": {},
    "aligned": {"time_units": 7},
    "partition": {"coverage": "partition", "align": 10},
}


def load_rows(start: int, stop: int) -> Any:
    return np.arange(start, stop, dtype=np.float64)[:, None]


def seen(chunk: Any) -> Batch:
    """Return where a chunk lies and two batches within it."""
    drawn = [sample_batch_within_chunk(chunk[0], batch_size=6, total_steps=2)[0].tolist() for _ in range(2)]
    return [chunk.start, chunk.stop, chunk.index, drawn]


def stream_of(loader: RandomChunkLoader) -> Iterator[Batch]:
    loader.start_epoch(None if loader.state_dict()["coverage"] == "partition" else 5)
    while (chunk := loader.get_next_chunk())[0] is not None:
        yield seen(chunk)


def stream_case(kind: str, root: Path) -> LoaderCase:
    def make(*, total: int = 1000, size: int = 70, **options: Any) -> RandomChunkLoader:
        return RandomChunkLoader(load_rows, total, size, "cpu", **{"seed": 3, **STREAMS[kind], **options})

    foreign = {
        "seed=4, here 3": {"seed": 4},
        "total_timesteps=999, here 1000": {"total": 999},
        "chunk_size=71, here 70": {"size": 71},
        r"align=\d+, here \d+": {"time_units": 20 if kind == "partition" else 2},
        "coverage=": {"align": 1, "coverage": "random" if kind == "partition" else "partition"},
    }
    ahead = ({"prefetch": 1}, {"prefetch": 7})
    return LoaderCase(make, foreign, ahead, epoch=stream_of, counts_batches=False, ends="cleanup", reopens=True)


def listed_stream(loader: PipelineChunkLoader) -> Iterator[Batch]:
    loader.start_epoch([(0, 5), (20, 29), (7, 11), (40, 90), (7, 11)])
    while (given := loader.get_next_chunk())[0] is not None:
        assert given[0] == given[1].start
        yield seen(given[1])


def pipeline_case(root: Path) -> LoaderCase:
    def make(**options: Any) -> PipelineChunkLoader:
        return PipelineChunkLoader(load_rows, "cpu", **{"seed": 8, **options})

    foreign, ahead = {"seed=9, here 8": {"seed": 9}}, ({"prefetch": 3},)
    return LoaderCase(make, foreign, ahead, epoch=listed_stream, counts_batches=False, ends="cleanup", reopens=True)


PACKED: tuple[Stored, ...] = ("columns", "mixed")
LOADERS: dict[str, Callable[[Path], LoaderCase]] = {
    **{f"Loader, {kind}": partial(plan_case, kind) for kind in PLANS},
    **{
        f"Loader, shards in {stored}, {order!r}": partial(shard_case, stored, order)
        for stored in PACKED
        for order in (Shuffle(), WindowShuffle(2))
    },
    "chain": chain_case,
    "mixture": mixture_case,
    **{f"Feed, {kind}": partial(feed_case, kind) for kind in ("a pass", "segments", "chunks")},
    "WebDatasetLoader": partial(webdataset_case, WebDatasetLoader, "none"),
    "WebDatasetLoader, gz": partial(webdataset_case, WebDatasetLoader, "gz"),
    "ResumableWebDatasetLoader": partial(webdataset_case, ResumableWebDatasetLoader, "none"),
    "create_webdataset_dataloader": create_case,
    **{f"CellMapDataLoader, {kind}": partial(cell_case, kind) for kind in SAMPLERS},
    "ChunkedDataLoader, an endless stream": partial(chunked_case, True),
    "ChunkedDataLoader, passes": partial(chunked_case, False),
    "ChunkedSampler": sampler_case,
    **{f"RandomChunkLoader, {kind}": partial(stream_case, kind) for kind in STREAMS},
    "PipelineChunkLoader": pipeline_case,
}
