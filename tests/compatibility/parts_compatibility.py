"""What the saved files are of: the same data, loaders and writers for who made the files and for who reads them today.

Values are their own position, counted from 1. Names of Penstock are public ones, looked up when they are used.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import penstock as ps

WRITTEN = Path(__file__).parent / "written_by_d511aa8"
"""The fixtures."""


def numbered(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Return an array whose values are their own position, counted from 1."""
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)


def plain(value: Any) -> Any:
    """Return a batch as JSON would give it back."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


# -- data sets of shards -----------------------------------------------------------------------------------------------

N_ARRAYS, ARRAYS_SHARD = 7, 3


def traces(count: int) -> list[NDArray[np.int32]]:
    """Return arrays of 1, 2, 3, 1, 2, 3, … values, counted on and on."""
    ends = np.cumsum([0, *(1 + number % 3 for number in range(count))])
    return [np.arange(begin + 1, end + 1, dtype=np.int32) for begin, end in pairwise(ends.tolist())]


def arrays(count: int = N_ARRAYS) -> dict[str, Any]:
    """Return a field of a fixed shape, a single number, and one of varying length."""
    return {"x": numbered(count, 3), "number": numbered(count, dtype=np.int64), "trace": traces(count)}


def odd_sample(number: int) -> dict[str, Any]:
    """Return a sample with one field of each kind, of a data set whose samples are counted from 1."""
    return {
        "signal": numbered(2, 2, dtype=np.float64) + 4 * (number - 1),
        "label": f"grün {number}",
        "raw": bytes([number, number + 1, 255]),
        "about": {"number": number, "list": [number, None, "a"]},
        "score": number / 8,
    }


def odd_id(number: int) -> str:
    """Return an id with a dot and a letter that needs care."""
    return f"sub-0{number}.ses-é"


def damage(folder: Path) -> None:
    """Change a byte of the items 1 and 5 of the data set by arrays."""
    for shard, item in (("shard_000000.tar", 1), ("shard_000001.tar", 5)):
        path = folder / shard
        content = bytearray(path.read_bytes())
        place = content.index(numbered(N_ARRAYS, 3)[item].tobytes())
        content[place] ^= 0xFF
        path.write_bytes(content)


def resumable(folder: Path, checkpoint: Path) -> Any:
    """Return a loader that saves after every second sample."""
    return ps.ResumableWebDatasetLoader(
        folder / "shards/arrays", checkpoint, checkpoint_interval=2, seed=8, fields=["number"]
    )


def begin_unfinished(folder: Path, *, resume: bool = False) -> Any:
    """Return the writer that was killed after five of its six samples, in its third shard."""
    return ps.WebDatasetWriter(folder, shard_size=2, metadata={"subject": "m1"}, resume=resume)


def begin_unpublished(folder: Path, *, resume: bool = False) -> Any:
    """Return the writer that was killed while it moved its shards into place."""
    return ps.WebDatasetWriter(folder, shard_size=2, compression="gz", resume=resume)


def unfinished_sample(number: int) -> dict[str, Any]:
    """Return sample `number`, counted from 0."""
    return {"x": numbered(6, 2)[number]}


# -- conversions -------------------------------------------------------------------------------------------------------


def yielded(path: Path) -> Iterator[Any]:
    """Yield three samples: what a function of the user's own may do."""
    for number in range(1, 4):
        yield {"value": np.array([number], np.float32)}, {"from": path.stem}


def conversions(inputs: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of a finished conversion of every kind of input, by name; the output is left out."""
    few = ps.ConvertOptions(ps.WriteOptions(3, compression="gz"))
    windows = ps.ReadOptions(sequence_length=2, overlap=0.5)
    sides = ps.Split((("train", 0.5), ("val", 0.5)), seed=3)
    split = ps.ConvertOptions(ps.WriteOptions(2, compression="gz"), sides, shuffle_seed=5, statistics=True)
    found: dict[str, dict[str, Any]] = {
        "split": {"inputs": [inputs / f"session_{name}.npz" for name in "abc"], "options": split},
        "npy": {"inputs": inputs / "rows.npy", "reading": windows, "options": few},
        "zarr": {"inputs": inputs / "rows.zarr", "options": few},
        "audio": {"inputs": inputs / "one.wav", "reading": ps.ReadOptions(window_seconds=0.004), "options": few},
        "shards": {"inputs": inputs / "shards", "options": few},
        "function": {"inputs": inputs / "rows.npy", "format": yielded, "options": few},
    }
    return {name: {**given, "show_progress": False} for name, given in found.items()}


def convert_unfinished(inputs: Path, folder: Path, *, resume: bool = False) -> Any:
    """Do the conversion that was killed after the first of its three shards."""
    options = ps.ConvertOptions(ps.WriteOptions(2, compression="gz"), statistics=True)
    given = [inputs / f"session_{name}.npz" for name in "ab"]
    return ps.convert_to_shards(given, folder, options=options, resume=resume, show_progress=False)


# -- volumes -----------------------------------------------------------------------------------------------------------

PATCH = {"shape": (2, 2, 2), "scale": (8.0, 8.0, 8.0)}


def cell(folder: Path, **options: Any) -> Any:
    """Return the patches of a small cell."""
    settings = {"classes": ["mito", "er"], "input_arrays": {"raw": PATCH}, "target_arrays": {"gt": PATCH}, **options}
    return ps.CellMapDataset(f"{folder}/cell/em", f"{folder}/cell/labels/[mito,er]", **settings)


def predictions(em: Path, out: Path, *, blend: Any = "abut", **options: Any) -> Any:
    """Return a writer of what a model says of the cell: two classes, two levels."""
    paths = (str(em), f"{out}/[mito,er]")
    return ps.CellMapDatasetWriter(
        *paths, ["mito", "er"], {"raw": PATCH}, {"gt": PATCH}, levels=2, blend=blend, **options
    )


def predicted(writer: Any, item: int) -> dict[str, Any]:
    """Return what the model says of a patch: the number of each voxel in the volume, and its negative."""
    values = writer[item]["raw"][0].numpy()
    return {"gt": np.stack([values, -values])}


# -- training ----------------------------------------------------------------------------------------------------------


class Noted:
    """Items of two features and a class; notes which it was asked for, and may fail at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[int] = []
        self._fail_at, self._features = fail_at, torch.from_numpy(numbered(16, 2) / 32)
        self.targets = np.arange(16) % 2

    def __len__(self) -> int:
        return 16

    def __getitem__(self, item: int) -> Any:
        if len(self.asked) == self._fail_at:
            raise RuntimeError("the disk is gone")
        self.asked.append(int(item))
        return self._features[item], int(self.targets[item])


def train_fold(dataset: Noted, folder: Path) -> dict[str, Any]:
    """Train one fold of four epochs, with a checkpoint after each."""

    def model(num_classes: int) -> torch.nn.Module:
        layer = torch.nn.Linear(2, num_classes)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[0.5, -0.25], [0.125, 0.75]]))
            layer.bias.zero_()
        return layer

    config = {
        "num_epochs": 4, "batch_size": 4, "learning_rate": 0.125, "use_adam": False, "standardize": False, "seed": 7,
        "lr_schedule": {"type": "exponential", "gamma": 0.5}, "optimize_dataloaders": False, "progress": False,
        "checkpoint_dir": folder, "device": "cpu",
    }  # fmt: skip
    found: dict[str, Any] = ps.TrainingEngine(model, 2, config).run_single_fold_predefined(
        dataset, np.arange(12), np.arange(12, 16)
    )
    return found


FOLD_LABELS = [number % 3 for number in range(24)]
FOLD_AUTHORS = [f"author {number // 3 % 6}" for number in range(24)]


def found_folds(cache: Path) -> dict[str, Any]:
    """Search for folds and for a split, or take what is kept of an earlier search."""
    folds = ps.best_grouped_folds(FOLD_LABELS, FOLD_AUTHORS, 3, max_attempts=50, cache=cache, show=False)
    split = ps.best_grouped_split(FOLD_LABELS, FOLD_AUTHORS, 0.3, max_attempts=50, cache=cache, show=False)
    return {
        "folds": {"val": [plain(fold.val) for fold in folds.folds], "score": folds.score, "seed": folds.seed},
        "split": {"test": plain(split.test), "score": split.score, "seed": split.seed},
    }


def moments() -> dict[str, Any]:
    """Return moments of channels, of an axis, of single values with NaN and infinity, and of nothing."""
    made = {
        "channels": ps.Moments(),
        "axis": ps.Moments(axis=0),
        "scalar": ps.Moments("scalar"),
        "nothing": ps.Moments(),
    }
    made["channels"].update(numbered(4, 2, 3))
    made["axis"].update(numbered(4, 2, 3))
    made["scalar"].update(np.array([1, np.nan, 3, np.inf, 5.5]))
    return made


def trainer_loaders() -> dict[str, Callable[[], Any]]:
    """Return what makes the loaders of a trainer: training in chunks of three batches, validation in order."""
    train, val = ps.ArraySource({"x": numbered(14)}), ps.ArraySource({"x": numbered(7) + 100})
    chunks = ps.Segments(ps.Plan(train.index, ps.Shuffle(), batch_size=2, seed=5), 3)
    whole = ps.Segments(ps.Plan(val.index, ps.Sequential(), batch_size=2, tail="short"), 2)
    return {"train": lambda: ps.Loader(train, chunks), "val": lambda: ps.Loader(val, whole)}


class Fitted(NamedTuple):
    """What Lightning's loop saw, and where its weight ended."""

    seen: list[Any]
    weight: float


def fit(ckpt_path: Path | None = None, save_after: tuple[int, Path] | None = None) -> Fitted:
    """Run three epochs of Lightning, from a checkpoint if there is one; save another after so many training batches."""
    import lightning.pytorch as pl

    seen: list[Any] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(self.layer.weight, 0.5)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(["train", batch["x"].tolist()])
            return ((self.layer(batch["x"][:, None] / 128) - 1) ** 2).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(["val", batch["x"].tolist()])

        def on_train_batch_end(self, *_: Any) -> None:
            if save_after is not None and len([kind for kind, _ in seen if kind == "train"]) == save_after[0]:
                self.trainer.save_checkpoint(save_after[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.125)

    model = Model()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, num_sanity_val_steps=0, **quiet)
    trainer.fit(model, datamodule=ps.PenstockDataModule(**trainer_loaders()), ckpt_path=ckpt_path)
    return Fitted(seen, model.layer.weight.item())


def accelerated(folder: Path, *, save: bool) -> list[Any]:
    """Save the state of Accelerate after four batches, or load it; return the batches that follow."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator = Accelerator(cpu=True)
        feed = ps.prepare_loader(accelerator, trainer_loaders()["train"]())
        stream = batches(feed)
        if save:
            for _ in islice(stream, 4):
                pass
            accelerator.save_state(str(folder))
        else:
            accelerator.load_state(str(folder))
        return list(islice(stream, 7))
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)


# -- orders ------------------------------------------------------------------------------------------------------------

LABELS = ["rare"] * 5 + ["common"] * 32


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
        found[f"{name}, two lanes"] = ps.Plan(index, order, batch_size=3, seed=2**40, lanes=2, tail="pad")
        found[f"{name}, segments"] = ps.Segments(ps.Plan(index, order, batch_size=4, seed=11), 3)
    found["selected"] = ps.Plan(index.select(range(0, 37, 2)), ps.WindowShuffle(2), batch_size=4, seed=11)
    found["one after the other"] = ps.Plan(
        ps.Index.concat([index, ps.Index.uniform(10, 4, identity="x")]), ps.WindowShuffle(3), batch_size=4, seed=11
    )
    found["segments of a pass"] = ps.Segments(ps.Plan(index, ps.Shuffle(), batch_size=4, seed=11, tail="short"), 3)
    return found


def described(plan: Any) -> dict[str, Any]:
    """Return what stands for an order: its identity, its hashes, and its beginning."""
    draws = [plan.epoch(epoch).draw(batch).items.tolist() for epoch, batch in ((0, 0), (0, 1), (5, 0))]
    hashes = [plan.order_hash(epoch) for epoch in range(3)]
    return {"identity": plan.identity(), "hashes": hashes, "batches": draws}


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


def batches(loader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        for batch in loader:
            yield plain(batch)


def patches(loader: Any) -> Iterator[Any]:
    """Yield the numbers of patches, and their voxels."""
    while True:
        for batch in loader:
            yield {"idx": batch["idx"].tolist(), "raw": batch["raw"].flatten().tolist()}


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
    train, val = data.train_dataloader(batch_size=2), data.val_dataloader(batch_size=2)
    data.load_state_dict(data.due)
    while True:
        for name, loader in (("train", train), ("val", val)):
            for batch in loader:
                yield [name, plain(batch)]


class _Modules:
    """A data module whose state may be given before its loaders are made."""

    @staticmethod
    def make() -> Any:
        class Module(ps.ChunkedSequenceDataset):
            due: Mapping[str, Any] = {}

            def setup(self) -> None:
                self.dataset_train, self.dataset_val = numbered(14).tolist(), (numbered(5) + 100).tolist()

        data = Module(3, 2, seed=9)
        data.setup()
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

    found = {f"source {name}": Case(made(name, ps.Shuffle()), batches, 2, 6) for name in sources}
    found["transform"] = Case(made("array", ps.WindowShuffle(2), transform=_drawn), batches, 13)
    found["threads"] = Case(made("array", ps.WindowShuffle(2), num_workers=2), batches, 3)
    return found


def plan_cases() -> dict[str, Case]:
    """Return a loader of every plan, one that goes on in other batches, and one that goes on with more ranks."""
    found = {f"plan {name}": Case(_over(plan), batches, 4, 6) for name, plan in plans().items()}
    source = ps.ArraySource({"x": numbered(37)})

    def loader(batch_size: int, rank: int = 0, size: int = 1) -> Callable[[], Any]:
        plan = ps.Plan(source.index, ps.Shuffle(), batch_size=batch_size, seed=4)
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
            lambda: ps.ChunkedDataLoader(ps.QuantizedAudioDataset(folder / "sound", sample_len=4), 2, 2), batches, 3, 5
        ),
        "chunked module": Case(_Modules.make, both_partitions, 8),
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

    def sampler() -> Any:
        return torch.utils.data.RandomSampler(range(20), num_samples=7, generator=torch.Generator().manual_seed(5))

    numbers = list(range(1, 10))
    return {
        "patches": Case(
            loader(lambda: cell(folder, spatial_transforms=mirror, is_train=True), rng=3), patches, 3, 5
        ),
        "patches, so many": Case(loader(lambda: cell(folder), iterations_per_epoch=4, near=4), patches, 5, 5),
        "patches, more than all": Case(loader(lambda: cell(folder), iterations_per_epoch=80), patches, 3, 5),
        "patches, weighted": Case(
            loader(crops, weighted_sampler=True, iterations_per_epoch=6, rng=4), patches, 7, 5
        ),
        "patches, sampled": Case(lambda: loader(lambda: cell(folder), sampler=sampler())(), patches, 6, 5),
        "patches, validation": Case(loader(lambda: cell(folder), is_train=False), patches, 2, 4),
        "patches, some": Case(
            loader(lambda: torch.utils.data.Subset(cell(folder), [5, 3, 8, 1, 13]), rng=2), patches, 1, 4
        ),
        "any dataset": Case(loader(lambda: numbers, rng=2), batches, 2, 5),
    }  # fmt: skip


def cases(folder: Path) -> dict[str, Case]:
    """Return every loader of which a state is saved."""
    return {**source_cases(folder), **plan_cases(), **recipe_cases(folder)}
