"""Lightning's checkpoints: a run resumes from each at the next batch, to the same weights."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler, TensorDataset

from penstock.core.errors import LoaderError, ResumeError
from penstock.feed.loader import Loader
from penstock.plan.orders import Sequential, Shuffle
from penstock.plan.plan import Plan, Segments
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.recipes.trainers.feed import Feed
from penstock.recipes.trainers.lightning import PenstockDataModule
from penstock.recipes.webdataset.loader import create_webdataset_dataloader
from penstock.recipes.webdataset.writer import create_shards_from_arrays
from penstock.run.options import RunOptions
from penstock.source.array import ArraySource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # lightning, of torch
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]

TRAIN, VAL = np.arange(14), np.arange(100, 107)
Seen = list[tuple[str, list[int]]]


class Counted(ChunkedSequenceDataset):
    def setup(self) -> None:
        self.dataset_train = TensorDataset(torch.from_numpy(TRAIN))
        self.dataset_val = TensorDataset(torch.from_numpy(VAL))


class Model(LightningModule):
    """Two weights, and a record of what every step saw but for sanity checks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.1)
        self.seen: Seen = []

    def saw(self, kind: str, batch: Any) -> torch.Tensor:
        items = batch["x"] if isinstance(batch, dict) else batch[0]
        if not self.trainer.sanity_checking:
            self.seen.append((kind, items.tolist()))
        return ((self.layer(items.float()[:, None] / 100) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.saw("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.saw("val", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def result(self) -> tuple[float, float, int]:
        return self.layer.weight.item(), self.layer.bias.item(), self.trainer.global_step


class Saving(Callback):
    """Saves a checkpoint wherever it may, and remembers how much was seen before it."""

    def __init__(self, folder: Path, *hooks: str) -> None:
        self.saved: list[tuple[str, int, Path]] = []
        self._folder = folder
        for hook in hooks:
            setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Callable[..., None]:
        def save(trainer: Trainer, model: Model, *_: Any) -> None:
            if not trainer.sanity_checking:
                path = self._folder / f"{len(self.saved)}.ckpt"
                trainer.save_checkpoint(path)
                self.saved.append((hook, len(model.seen), path))

        return save


def trainer(**options: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **options})


def fitted(data: Any, path: Path | None = None, **options: Any) -> Model:
    """Train with a data module, a model that makes its loaders, or a tuple of loaders."""
    model = data if isinstance(data, Model) else Model()
    if isinstance(data, LightningDataModule):
        trainer(**options).fit(model, datamodule=data, ckpt_path=path)
    else:
        trainer(**options).fit(model, *(data if isinstance(data, tuple) else ()), ckpt_path=path)
    return model


def chunks(**loader: Any) -> PenstockDataModule:
    return PenstockDataModule(Counted(3, 2), {"batch_size": 2, **loader})


def native(train_length: int | None, workers: int = 0) -> PenstockDataModule:
    train, val = ArraySource({"x": TRAIN}), ArraySource({"x": VAL})
    plan: Plan = Plan(train.index, Shuffle(), batch_size=2, seed=5, tail="drop")
    if train_length is not None:
        plan = Segments(plan, train_length)
    order = Segments(Plan(val.index, Sequential(), batch_size=2, tail="short"), 2)
    return PenstockDataModule(
        train=lambda: Loader(train, plan, num_workers=workers),
        val=lambda: Loader(val, order),
        test=lambda: Loader(val, order),
    )


def train_only(seen: Seen) -> Seen:
    return [one for one in seen if one[0] == "train"]


def check_every_resume(make: Callable[[], Any], folder: Path, *hooks: str, **options: Any) -> None:
    """Compare a run from each checkpoint with what was left of the run that saved it."""
    saving = Saving(folder, *hooks)
    whole = fitted(make(), callbacks=[saving], **options)
    assert saving.saved
    for hook, count, path in saving.saved:
        found, rest = fitted(make(), path, **options), whole.seen[count:]
        skipped = hook == "on_train_batch_end" and (not rest or rest[0][0] == "val")
        if skipped:  # Lightning's own: the validation that was due is not made up for
            found.seen, rest = train_only(found.seen), train_only(rest)
        assert found.seen == rest, (hook, count)
        assert found.result() == whole.result(), (hook, count)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 4},
        {"max_epochs": 3, "val_check_interval": 2},
        {"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None},
        {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
        {"max_epochs": -1, "max_steps": 8},
    ],
)
def test_a_run_goes_on_from_every_batch_validation_and_epoch(options: dict[str, Any], tmp_path: Path) -> None:
    check_every_resume(chunks, tmp_path, "on_train_batch_end", "on_validation_end", "on_train_epoch_end", **options)


@pytest.mark.parametrize("make", [lambda: native(None), lambda: native(3), lambda: native(3, workers=2)])
def test_native_loaders_resume_too(make: Callable[[], PenstockDataModule], tmp_path: Path) -> None:
    hooks = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
    check_every_resume(make, tmp_path, *hooks, max_epochs=2)


def test_epochs_of_native_loaders_are_those_of_their_plans() -> None:
    model = fitted(native(None), max_epochs=3)
    plan = Plan(ArraySource({"x": TRAIN}).index, Shuffle(), batch_size=2, seed=5)
    assert train_only(model.seen) == [
        ("train", plan.epoch(epoch).draw(batch).items.tolist()) for epoch in range(3) for batch in range(7)
    ]
    parts = [[100, 101], [102, 103], [104, 105], [106], [100, 101], [102, 103]]
    assert [items for kind, items in model.seen if kind == "val"] == parts
    other = Model()
    trainer().validate(other, native(3), verbose=False)
    assert [items for _, items in other.seen] == parts[:4]


def test_chunks_are_counted_alike_whatever_the_loader() -> None:
    source = ArraySource({"x": TRAIN})
    for shuffle in (True, False):
        tail = "drop" if shuffle else "short"
        segments = Segments(Plan(source.index, Shuffle(), batch_size=2, tail=tail), 3)
        mine, chunked = Feed(Loader(source, segments)), ChunkedDataLoader(TRAIN.tolist(), 2, 3, shuffle=shuffle)
        for chunk in range(12):
            mine.go_to(chunk)
            chunked.set_chunk(chunk)
            info = chunked.get_chunk_info()
            at = mine.place()
            assert (at["pass"] - 1, at["chunk"] - 1, at["chunks"]) == (info["pass"], info["chunk_of_pass"], 3)
            assert Feed(chunked).describe() == mine.describe()
            assert Feed(chunked).place()["chunks"] == info["total_chunks"]


def test_workers_and_a_validation_that_was_left_in_the_middle(tmp_path: Path) -> None:
    check_every_resume(lambda: chunks(num_workers=1), tmp_path, "on_train_epoch_end", max_epochs=2)
    saving = Saving(tmp_path, "on_validation_batch_end")
    fitted(chunks(), callbacks=[saving], max_epochs=2)
    rest = fitted(chunks(), saving.saved[0][2], max_epochs=3).seen
    # Lightning leaves that validation be; the next one has what was left of its chunk, and so each item its turn.
    assert [items for kind, items in rest if kind == "val"] == [[102, 103], [104, 105], [106]]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_model_checkpoints_go_on(tmp_path: Path) -> None:
    def saved(folder: str, path: Path | None = None) -> Model:
        saving = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        return fitted(chunks(), path, max_epochs=3, callbacks=[saving], enable_checkpointing=True)

    whole = saved("whole")
    for step in (2, 4, 8):
        rest = saved(f"from_{step}", tmp_path / "whole" / f"step={step}.ckpt")
        assert train_only(rest.seen) == train_only(whole.seen)[step:]
        assert rest.result() == whole.result()


def test_accumulated_gradients_go_on_from_steps_and_are_reported_lost_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_epochs": 3, "accumulate_grad_batches": 2}
    saving = Saving(tmp_path, "on_train_batch_end")
    whole = fitted(chunks(), callbacks=[saving], **options)
    assert whole.trainer.global_step == 6  # the end of a chunk is a step, too
    for number, (_, count, path) in enumerate(saving.saved):
        caplog.clear()
        with caplog.at_level(logging.INFO, "penstock"):
            rest = fitted(chunks(), path, **options)
        assert train_only(rest.seen) == train_only(whole.seen[count:])
        within = number % 3 == 0
        assert ("gradients of 1 batches are lost" in caplog.text) == within
        assert (rest.result() == whole.result()) != within
    folder = tmp_path / "epochs"
    folder.mkdir()
    check_every_resume(chunks, folder, "on_validation_end", "on_train_epoch_end", **options)


def test_validation_in_the_short_chunk_after_a_resume_does_not_shorten_the_others(tmp_path: Path) -> None:
    def uneven() -> PenstockDataModule:
        return PenstockDataModule(Counted(3, 3), {"batch_size": 2})  # 4 batches a pass: 3, then 1

    check_every_resume(uneven, tmp_path, "on_train_batch_end", "on_train_epoch_end", max_epochs=4)


def test_a_resumed_run_says_where_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = Saving(tmp_path, "on_train_batch_end", "on_train_epoch_end")
    fitted(chunks(), callbacks=[saving], max_epochs=4)
    places = {}
    for _, _, path in saving.saved:
        caplog.clear()
        with caplog.at_level(logging.INFO, "penstock"):
            fitted(chunks(), path, max_epochs=5)
        messages = [record.getMessage() for record in caplog.records if record.name == "penstock"]
        assert len(messages) == 1
        places[path.stem] = messages[0]
    # Each epoch: three batches, then its end.
    assert places["0"] == "resumed at pass 1, chunk 1/3, batch 1"
    assert places["3"] == "resumed at pass 1, chunk 2/3, batch 0"
    assert places["13"] == "resumed at pass 2, chunk 1/3, batch 2"
    caplog.clear()
    with caplog.at_level(logging.INFO, "penstock"):
        fitted(chunks(), max_epochs=1)
    assert "resumed at" not in caplog.text


def test_a_trainer_and_a_loader_that_disagree_are_refused(tmp_path: Path) -> None:
    saving = Saving(tmp_path, "on_train_batch_end")
    fitted(chunks(), callbacks=[saving], max_epochs=2)
    path = saving.saved[1][2]
    state = torch.load(path, weights_only=False)
    for place in (state["PenstockDataModule"]["train"], state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]):
        assert place["batch"] == 2
        place["batch"] = 1
    torch.save(state, tmp_path / "other.ckpt")
    with pytest.raises(ResumeError, match="at the same batch, got 2 of epoch 0 and 1 on rank"):
        fitted(chunks(), tmp_path / "other.ckpt", max_epochs=2)
    other = PenstockDataModule(Counted(3, 2, seed=7), {"batch_size": 2})
    with pytest.raises(ResumeError, match="the seed changed from 42 to 7"):
        fitted(other, path, max_epochs=2)


def test_a_checkpoint_without_chunks_begins_the_first_chunk_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = PenstockDataModule(Counted(), {"batch_size": 2})
    saving = Saving(tmp_path, "on_train_epoch_end", "on_train_batch_end")
    fitted(plain, callbacks=[saving], max_epochs=1)
    with caplog.at_level(logging.WARNING, "penstock"):
        found = fitted(chunks(), saving.saved[-1][2], max_epochs=2)
    assert train_only(found.seen) == train_only(fitted(chunks(), max_epochs=1).seen)
    assert "has no position of the training loader, which starts at pass 1, chunk 1/3, batch 0" in caplog.text
    with pytest.raises(ResumeError, match="without the position of the loader"):
        fitted(chunks(), saving.saved[1][2], max_epochs=2)


def test_a_loader_that_was_given_keeps_its_own_place(tmp_path: Path) -> None:
    given = ChunkedDataLoader(TRAIN.tolist(), 2, 3)
    given.set_chunk(4)
    seen: list[list[int]] = []

    class Items(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch.tolist())
            return super().training_step([batch], batch_idx)

        validation_step = LightningModule.validation_step

    trainer(max_epochs=2).fit(Items(), datamodule=PenstockDataModule(train=given))
    expected = given.chunked.get_chunk_indices(4) + given.chunked.get_chunk_indices(5)
    assert [item for batch in seen for item in batch] == expected


class Asked(LightningDataModule):
    """Somebody's own data module: asks its data for loaders, and saves their state."""

    def __init__(self) -> None:
        super().__init__()
        self.data = Counted(3, 2)

    def setup(self, stage: str) -> None:
        self.data.setup()

    def train_dataloader(self) -> Any:
        return self.data.train_dataloader(batch_size=2)

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader(batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.load_state_dict(state_dict)


def test_loaders_that_are_asked_for_in_every_epoch_go_on_and_resume(tmp_path: Path) -> None:
    options: Any = {"num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": 1}
    whole = fitted(Asked(), max_epochs=5, **options)
    assert whole.seen == fitted(chunks(), max_epochs=5, num_sanity_val_steps=0).seen
    assert {item for _, items in train_only(whole.seen) for item in items} == set(TRAIN.tolist())
    model, one = Model(), trainer(max_epochs=2, **options)
    one.fit(model, datamodule=Asked())
    one.save_checkpoint(tmp_path / "two.ckpt")
    rest = fitted(Asked(), tmp_path / "two.ckpt", max_epochs=5, **options)
    assert model.seen + rest.seen == whole.seen
    assert rest.result() == whole.result()


# -- loaders that the Trainer gets as they are -------------------------------------------------------------------------


class OwnModel(Model):
    """Somebody's own module, which makes its loaders."""

    def setup(self, stage: str) -> None:
        self.data = Counted(3, 2)
        self.data.setup()

    train_dataloader, val_dataloader = Asked.train_dataloader, Asked.val_dataloader


class OwnData(Asked):
    """Somebody's own data module, which saves no state."""

    state_dict, load_state_dict = LightningDataModule.state_dict, LightningDataModule.load_state_dict


def one_pass() -> tuple[Any, Any]:
    train, val = ArraySource({"x": TRAIN}), ArraySource({"x": VAL})
    plan = Plan(train.index, Shuffle(), batch_size=2, seed=5, tail="drop")
    return Loader(train, plan), Loader(val, Plan(val.index, Sequential(), batch_size=2, tail="short"))


def segments() -> tuple[Any, Any]:
    (train, val), threads = one_pass(), RunOptions(executor="threads")
    plans = Segments(train.plan, 3), Segments(val.plan, 2)
    return Loader(train.source, plans[0], num_workers=2, options=threads), Loader(val.source, plans[1])


def torch_chunks() -> tuple[Any, Any]:
    train, val = (TensorDataset(torch.from_numpy(items)) for items in (TRAIN, VAL))
    return ChunkedDataLoader(train, 2, 3), ChunkedDataLoader(val, 2, 2, shuffle=False)


def shards(folder: Path) -> tuple[Any, Any]:
    for name, items in (("train", TRAIN), ("val", VAL)):
        if not (folder / name).exists():
            create_shards_from_arrays(folder / name, {"x": items}, shard_size=5)
    train = create_webdataset_dataloader(folder / "train", batch_size=2, num_workers=0)
    return train, create_webdataset_dataloader(folder / "val", batch_size=2, num_workers=0, shuffle=False)


def cells(sampled: bool) -> tuple[Any, Any]:
    train, val = (TensorDataset(torch.from_numpy(items)) for items in (TRAIN, VAL))
    sampler = DistributedSampler(train, num_replicas=1, rank=0, seed=3) if sampled else None
    return CellMapDataLoader(train, batch_size=2, sampler=sampler, drop_last=True), CellMapDataLoader(
        val, batch_size=2, is_train=False
    )


AS_THEY_ARE: dict[str, Callable[[Path], Any]] = {
    "a pass": lambda folder: one_pass(),
    "segments": lambda folder: segments(),
    "chunks": lambda folder: torch_chunks(),
    "shards": shards,
    "cells": lambda folder: cells(False),
    "cells by a sampler": lambda folder: cells(True),
    "own data module": lambda folder: OwnData(),
    "own data module with a state": lambda folder: Asked(),
    "own module": lambda folder: OwnModel(),
    "PenstockDataModule": lambda folder: PenstockDataModule(train=segments()[0], val=segments()[1]),
}


@pytest.mark.parametrize("validates", [True, False], ids=["validated", "not validated"])
@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_loaders_resume_as_they_are_from_the_ends_of_epochs_too(kind: str, validates: bool, tmp_path: Path) -> None:
    def check(*hooks: str, **options: Any) -> None:
        check_every_resume(lambda: AS_THEY_ARE[kind](tmp_path), tmp_path, *hooks, **options)

    limit: dict[str, Any] = {} if validates else {"limit_val_batches": 0}
    if kind == "own data module with a state":  # which has what the sanity check delivered
        limit["num_sanity_val_steps"] = 0
    check("on_train_epoch_end", *(["on_validation_end"] if validates else []), max_epochs=3, **limit)
    check("on_train_batch_end", max_epochs=2, reload_dataloaders_every_n_epochs=1, **limit)
    if validates:  # without, Lightning ends the epoch that it resumes after one batch
        check("on_validation_end", max_epochs=-1, max_steps=8, **limit)


@pytest.mark.parametrize("make", [one_pass, segments, torch_chunks])
def test_a_loader_is_at_the_epoch_of_whichever_trainer_it_is_given_to(make: Any, tmp_path: Path) -> None:
    (given, _), whole = make(), fitted(make()[:1], max_epochs=4)
    next(iter(given))  # just to look
    saving = Saving(tmp_path, "on_train_epoch_end")
    assert fitted((given,), max_epochs=3, callbacks=[saving]).seen == whole.seen[: len(whole.seen) * 3 // 4]
    for hook, count, path in saving.saved[1:]:
        assert fitted((given,), path, max_epochs=4).seen == whole.seen[count:], hook
    assert fitted((given,), max_epochs=1).seen == whole.seen[: len(whole.seen) // 4]


def test_what_a_trainer_cannot_resume_names_the_data_module(tmp_path: Path) -> None:
    saving = Saving(tmp_path, "on_train_epoch_end", "on_train_batch_end")
    fitted(one_pass()[:1], max_epochs=2, limit_train_batches=2, callbacks=[saving])
    with pytest.raises(
        LoaderError, match=r"at the same epoch, got 1 and 0 \(batch 2 of 7\).*PenstockDataModule\(train="
    ):
        fitted(one_pass()[:1], saving.saved[1][2], max_epochs=2, limit_train_batches=2)
    given = torch_chunks()[0]
    given.set_chunk(4)
    with pytest.raises(LoaderError, match=r"at the same epoch, got 1 and 4 .*PenstockDataModule\(train="):
        fitted((given,), saving.saved[2][2], max_epochs=2)
    with pytest.raises(
        LoaderError, match=r"named epoch 3 after epoch 1, as with check_val_every_n_epoch=2.*val=loader"
    ):
        fitted(torch_chunks(), max_epochs=4, check_val_every_n_epoch=2)


def test_what_lightning_leaves_of_an_epoch_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = Saving(tmp_path, "on_train_epoch_end")
    fitted(one_pass()[:1], max_epochs=-1, max_steps=7, callbacks=[saving])
    fitted(one_pass()[:1], saving.saved[0][2], max_epochs=-1, max_steps=9)
    assert "Epoch 1 was left after 1 of 7 batches: the other 6 are left behind" in caplog.text
