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
    if hasattr(value, "tolist"):  # of tensors, arrays, numbers, and metadata
        return plain(value.tolist())
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def batches(loader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        for batch in loader:
            yield plain(batch)


# -- data sets of shards -----------------------------------------------------------------------------------------------

N_ARRAYS, ARRAYS_SHARD = 5, 2
ABOUT = {"subject": {"name": "m1", "age": 12}}


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
    """Change a byte of the items 1 and 4 of the data set by arrays."""
    for shard, item in (("shard_000000.tar", 1), ("shard_000002.tar", 4)):
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
    """Return the writer that was killed after three of its four samples, in its second shard."""
    return ps.WebDatasetWriter(folder, shard_size=2, metadata={"subject": "m1"}, resume=resume)


def begin_unpublished(folder: Path, *, resume: bool = False) -> Any:
    """Return the writer that was killed while it moved its shards into place."""
    return ps.WebDatasetWriter(folder, shard_size=2, compression="gz", resume=resume)


def unfinished_sample(number: int) -> dict[str, Any]:
    """Return sample `number`, counted from 0."""
    return {"x": numbered(4, 2)[number]}


# -- conversions -------------------------------------------------------------------------------------------------------


def yielded(path: Path) -> Iterator[Any]:
    """Yield three samples: what a function of the user's own may do."""
    for number in range(1, 4):
        yield {"value": np.array([number], np.float32)}, {"from": path.stem}


def conversions(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of a finished conversion of every kind of input, by name; the output is left out."""
    inputs = folder / "converted/inputs"
    few = ps.ConvertOptions(ps.WriteOptions(3, compression="gz"))
    windows = ps.ReadOptions(sequence_length=2, overlap=0.5)
    sides = ps.Split((("train", 0.5), ("val", 0.5)), seed=3)
    split = ps.ConvertOptions(ps.WriteOptions(2, compression="gz"), sides, shuffle_seed=5, statistics=True)
    found: dict[str, dict[str, Any]] = {
        "split": {"inputs": [inputs / f"session_{name}.npz" for name in "abc"], "options": split},
        "npy": {"inputs": inputs / "rows.npy", "reading": windows, "options": few},
        "zarr": {"inputs": inputs / "rows.zarr", "options": few},
        "audio": {"inputs": folder / "sound/one.wav", "reading": ps.ReadOptions(window_seconds=0.004), "options": few},
        "shards": {"inputs": folder / "shards/gz", "options": few},
        "function": {"inputs": inputs / "rows.npy", "format": yielded, "options": few},
    }
    return {name: {**given, "show_progress": False} for name, given in found.items()}


def converted_values(folder: Path) -> dict[str, Any]:
    """Return what is in the data sets that the conversions wrote, in the order in which it is stored."""
    found: dict[str, Any] = {}
    for name in ("split/train", "split/val", "npy", "zarr", "audio", "shards", "function"):
        source = ps.TarSource(folder / "converted" / name)
        found[name] = plain(source.take(np.arange(len(source.index))))
        found[name]["metadata"] = [[entry.get("file"), entry.get("row")] for entry in found[name]["metadata"]]
    return found


def convert_unfinished(folder: Path, output: Path, *, resume: bool = False) -> Any:
    """Do the conversion that was killed after the first of its three shards."""
    options = ps.ConvertOptions(ps.WriteOptions(2, compression="gz"), statistics=True)
    given = [folder / f"converted/inputs/session_{name}.npz" for name in "ab"]
    return ps.convert_to_shards(given, output, options=options, resume=resume, show_progress=False)


# -- volumes -----------------------------------------------------------------------------------------------------------

PATCH = {"shape": (2, 2, 2), "scale": (8.0, 8.0, 8.0)}


def cell(folder: Path, **options: Any) -> Any:
    """Return the patches of a small cell."""
    settings = {"classes": ["mito", "er"], "input_arrays": {"raw": PATCH}, "target_arrays": {"gt": PATCH}, **options}
    return ps.CellMapDataset(f"{folder}/cell/em", f"{folder}/cell/labels/[mito,er]", **settings)


def predictions(em: Path, out: Path, *, blend: Any = "abut", **options: Any) -> Any:
    """Return a writer of what a model says of the cell: two classes, two levels."""
    classes, place = ["mito", "er"], f"{out}/[mito,er]"
    return ps.CellMapDatasetWriter(
        str(em), place, classes, {"raw": PATCH}, {"gt": PATCH}, levels=2, blend=blend, **options
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
    chunks = ps.Segments(ps.Plan(train.index, ps.Shuffle(), batch_size=2, seed=5, tail="drop"), 3)
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
        found = list(islice(stream, 7))
        stream.close()
        return found
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
