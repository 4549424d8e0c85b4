"""Lightning's Trainer, fed in chunks: which items every step sees, in every configuration."""

import csv
import logging
import multiprocessing
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from penstock_cases import few_cases
from torch.utils.data import DataLoader, Dataset, TensorDataset

from penstock.core.errors import LoaderError, OptionError
from penstock.plan.world import World
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset
from penstock.recipes.chunked.loader import ChunkedDataLoader, ChunkedSampler
from penstock.recipes.trainers.lightning import ChunkProgress, PenstockDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # lightning, of torch
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]

TRAIN, VAL, TEST = list(range(14)), list(range(100, 107)), list(range(200, 205))
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Counted(ChunkedSequenceDataset):
    """Numbers that say which item they are."""

    items: tuple[list[int], list[int]] = (TRAIN, VAL)

    def setup(self) -> None:
        self.dataset_train, self.dataset_val = (TensorDataset(torch.tensor(part)) for part in self.items)
        self.dataset_test = TensorDataset(torch.tensor(TEST))


class Trained(LightningModule):
    """Two weights, and a record of what every step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.1)
        self.seen: list[tuple[str, list[int]]] = []

    def saw(self, kind: str, batch: Any) -> torch.Tensor:
        self.seen.append((kind, batch[0].tolist()))
        return ((self.layer(batch[0].float()[:, None] / 100) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.saw("train", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def weights(self) -> list[float]:
        return [self.layer.weight.item(), self.layer.bias.item()]


class Model(Trained):
    """With validation and test."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.saw("sanity" if self.trainer.sanity_checking else "val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.saw("test", batch)


def trainer(**options: Any) -> Trainer:
    return Trainer(**{**QUIET, **options})


def module(train: int | None = None, val: int | None = None, **loader: Any) -> PenstockDataModule:
    return PenstockDataModule(Counted(train, val), {"batch_size": 2, **loader})


def fitted(data: PenstockDataModule, **options: Any) -> Model:
    model = Model()
    trainer(**{"max_epochs": 4, **options}).fit(model, datamodule=data)
    return model


def epochs(seen: list[tuple[str, list[int]]], kind: str) -> list[list[list[int]]]:
    """The batches of each uninterrupted run of one kind."""
    found: list[list[list[int]]] = []
    before = ""
    for name, items in seen:
        if name == kind:
            if before != kind:
                found.append([])
            found[-1].append(items)
        before = name
    return found


def cut(items: list[int], batch: int = 2) -> list[list[int]]:
    return [items[start : start + batch] for start in range(0, len(items), batch)]


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 2, "limit_val_batches": 1}, {"limit_val_batches": 0.3}])
@pytest.mark.parametrize(("train", "val"), [(3, None), (None, 2), (3, 2)])
def test_either_size_walks_all_items_in_chunks_and_the_limits_are_ignored_with_one_warning(
    train: int | None, val: int | None, limits: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        seen = fitted(module(train, val), **limits).seen
    sampler = ChunkedSampler(14, 2 * (train or 7), seed=42)
    assert epochs(seen, "train") == [cut(sampler.get_chunk_indices(chunk)) for chunk in range(4)]
    first, last = cut(VAL)[:2], cut(VAL)[2:]
    assert epochs(seen, "val") == ([first, last, first, last] if val else [cut(VAL)] * 4)
    assert [kind for kind, _ in seen if kind == "sanity"] == ["sanity"] * 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(limits)
    assert all(f"{name}={limit}" in messages[0] for name, limit in limits.items())


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 2, "limit_val_batches": 1}])
@pytest.mark.parametrize("workers", [0, 1])
def test_without_sizes_everything_is_bit_equal_to_lightning_with_torch_loaders(
    limits: dict[str, Any], workers: int
) -> None:
    torch.manual_seed(3)
    found = fitted(module(num_workers=workers), **limits, max_epochs=2)
    torch.manual_seed(3)
    plain = Model()
    shuffled = DataLoader(TensorDataset(torch.tensor(TRAIN)), 2, shuffle=True, num_workers=workers)
    ordered = DataLoader(TensorDataset(torch.tensor(VAL)), 2, num_workers=workers)
    trainer(max_epochs=2, **limits).fit(plain, shuffled, ordered)
    assert found.seen == plain.seen
    assert found.weights() == plain.weights()
    assert len(epochs(found.seen, "train")[0]) == limits.get("limit_train_batches", 7)


@few_cases
@given(
    st.tuples(st.integers(1, 13), st.integers(1, 9)),
    st.tuples(st.integers(1, 15), st.integers(1, 12)),
    st.integers(1, 5),
)
def test_visits_differ_by_one_at_most_and_validation_sees_each_item_once_a_pass_in_order(
    sizes: tuple[int, int], chunks: tuple[int, int], batch: int
) -> None:
    data = Counted(*chunks)
    data.items = (list(range(sizes[0])), list(range(100, 100 + sizes[1])))
    seen = fitted(PenstockDataModule(data, {"batch_size": batch})).seen
    trained = epochs(seen, "train")
    assert [[len(items) for items in chunk] for chunk in trained] == [[batch] * chunks[0]] * 4
    visits = Counter(dict.fromkeys(range(sizes[0]), 0)) + Counter(
        item for chunk in trained for items in chunk for item in items
    )
    counts = [visits[item] for item in range(sizes[0])]
    assert max(counts) - min(counts) <= 1
    of_pass = cut(data.items[1], batch)
    chunked = [of_pass[start : start + chunks[1]] for start in range(0, len(of_pass), chunks[1])]
    assert epochs(seen, "val") == [chunked[number % len(chunked)] for number in range(4)]


def test_membership_of_chunks_changes_from_pass_to_pass_and_each_pass_holds_every_item() -> None:
    found = epochs(fitted(module(7, None, batch_size=1)).seen, "train")
    members = [{item for items in chunk for item in items} for chunk in found]
    assert members[0] | members[1] == members[2] | members[3] == set(TRAIN)
    assert members[0] != members[2]


def test_one_item_is_enough() -> None:
    data = Counted(2, 1)
    data.items = ([5], [100])
    seen = fitted(PenstockDataModule(data, {"batch_size": 3}), max_epochs=2, num_sanity_val_steps=0).seen
    assert seen == [("train", [5, 5, 5]), ("train", [5, 5, 5]), ("val", [100])] * 2


def test_validate_and_test_see_all_once_and_leave_fit_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    data, model = module(3, 2), Model()
    one = trainer(max_epochs=1, num_sanity_val_steps=0)
    one.fit(model, datamodule=data)
    before = data.state_dict()
    one.validate(model, data, verbose=False)
    one.test(model, data, verbose=False)
    assert [items for kind, items in model.seen[3:]] == cut(VAL)[:2] + cut(VAL) + cut(TEST)
    assert data.state_dict() == before
    other = Model()
    with caplog.at_level(logging.WARNING, "penstock"):
        trainer(limit_val_batches=1).validate(other, module(3), verbose=False)
    assert other.seen == [("val", items) for items in cut(VAL)]
    assert "limit_val_batches=1: ignored" in caplog.text


def test_the_same_trainer_goes_on_with_the_next_chunk_and_another_one_begins_anew() -> None:
    whole, data = fitted(module(3, 2)).seen, module(3, 2)
    model = Model()
    one = trainer(max_epochs=1)
    one.fit(model, datamodule=data)
    one.fit_loop.max_epochs = 3
    one.fit(model, datamodule=data)
    assert epochs(model.seen, "train") == epochs(whole, "train")[:3]
    assert epochs(model.seen, "val") == epochs(whole, "val")[:3]
    assert fitted(data).seen == whole


def test_the_rest_of_an_interrupted_chunk_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    model, data = Model(), module(3)
    one = trainer(max_steps=2)
    one.fit(model, datamodule=data)
    one.fit_loop.epoch_loop.max_steps = 5
    with caplog.at_level(logging.WARNING, "penstock"):
        one.fit(model, datamodule=data)
    assert "rest of the epoch after pass 1, chunk 1/3, batch 2 is skipped" in caplog.text
    chunks = [cut(ChunkedSampler(14, 6, seed=42).get_chunk_indices(chunk)) for chunk in range(2)]
    assert epochs(model.seen, "train") == [chunks[0][:2], chunks[1]]


@pytest.mark.parametrize("interval", [2, 0.67])
def test_validation_within_a_chunk_moves_on_through_validation_too(interval: float) -> None:
    seen = fitted(module(3, 2), val_check_interval=interval, max_epochs=2, num_sanity_val_steps=0).seen
    assert [kind for kind, _ in seen] == ["train", "train", "val", "val", "train"] * 2
    assert epochs(seen, "val") == [cut(VAL)[:2], cut(VAL)[2:]]


def test_the_trainer_knows_how_many_steps_there_are() -> None:
    one, model = trainer(max_epochs=3, accumulate_grad_batches=2), Model()
    estimates: list[Any] = []
    model.configure_optimizers = lambda: (  # type: ignore[method-assign]
        estimates.append(one.estimated_stepping_batches) or torch.optim.SGD(model.parameters(), lr=0.1)
    )
    one.fit(model, datamodule=module(3, 2))
    assert estimates == [6]
    assert one.global_step == 6
    assert (one.num_training_batches, one.num_val_batches, one.current_epoch) == (3, [2], 3)
    assert epochs(model.seen, "train") == epochs(fitted(module(3)).seen, "train")[:3]


def test_reloading_goes_on_and_max_steps_ends_within_a_chunk() -> None:
    usual = fitted(module(3, 2), max_epochs=3).seen
    assert fitted(module(3, 2), max_epochs=3, reload_dataloaders_every_n_epochs=1).seen == usual
    two = fitted(module(3, 2), max_epochs=4, reload_dataloaders_every_n_epochs=2).seen
    assert two[: len(usual)] == usual
    steps = fitted(module(3, 2), max_epochs=-1, max_steps=5).seen
    assert [one for one in steps if one[0] == "train"] == [one for one in usual if one[0] == "train"][:5]


def test_runs_that_are_meant_to_be_short_are(caplog: pytest.LogCaptureFixture) -> None:
    usual = epochs(fitted(module(3, 2)).seen, "train")
    with caplog.at_level(logging.WARNING, "penstock"):
        fast = fitted(module(3, 2), fast_dev_run=2).seen
        over = fitted(module(3, 2), overfit_batches=2, num_sanity_val_steps=0).seen
    assert fast == [("train", items) for items in usual[0][:2]] + [("val", items) for items in cut(VAL)[:2]]
    again = [("train", items) for items in usual[0][:2]] + [("val", items) for items in cut(VAL)[:2]]
    assert over == again * 4
    assert "ignored" not in caplog.text


def test_a_search_for_the_learning_rate_leaves_the_order_as_it_was(tmp_path: Path) -> None:
    data, model = module(3, 2), Model()
    model.lr = 0.1
    one = trainer(max_epochs=2, default_root_dir=tmp_path)
    Tuner(one).lr_find(model, datamodule=data, num_training=5, update_attr=False)
    model.seen.clear()
    one.fit(model, datamodule=data)
    assert model.seen == fitted(module(3, 2), max_epochs=2).seen


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")  # lightning: experimental
def test_steps_that_take_their_batches_themselves_get_the_same_ones() -> None:
    class Taking(Trained):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.saw("train", [batch])

    model = Taking()
    trainer(max_epochs=2).fit(model, datamodule=PenstockDataModule(train=lambda: ChunkedDataLoader(TRAIN, 2, 3)))
    chunks = [cut(ChunkedSampler(14, 6, seed=42).get_chunk_indices(chunk)) for chunk in range(2)]
    assert [items for _, items in model.seen] == chunks[0] + chunks[1]


class Workers(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> tuple[int, int]:
        return item, os.getpid()


def test_workers_persist_over_chunks_and_end_with_the_run() -> None:
    class Data(ChunkedSequenceDataset):
        def setup(self) -> None:
            self.dataset_train, self.dataset_val = Workers(), Workers()

    class Pids(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            pids.update(batch[1].tolist())
            return super().training_step(batch, batch_idx)

    pids: set[int] = set()
    model = Pids()
    options = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    data = PenstockDataModule(Data(train_chunk_size=2), options)
    trainer(max_epochs=4, num_sanity_val_steps=1).fit(model, datamodule=data)
    trained = [item for kind, items in model.seen for item in items if kind == "train"]
    assert sorted(trained) == sorted([*range(8), *range(8)])
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert multiprocessing.active_children() == []


def test_the_log_and_the_bar_name_pass_chunk_and_number_of_chunks(tmp_path: Path) -> None:
    shown: list[Any] = []

    class Watched(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            names = ("pass", "chunk", "chunks")
            shown.append(tuple(self.trainer.progress_bar_metrics.get(name) for name in names))

    logger = CSVLogger(tmp_path)
    trainer(max_epochs=4, logger=logger, log_every_n_steps=1).fit(Watched(), datamodule=module(3, 2))
    expected = [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert shown == [(of_pass, chunk, 3) for of_pass, chunk in expected for _ in range(3)]
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [(float(row["pass"]), float(row["chunk"])) for row in csv.DictReader(file) if row["chunk"]]
    assert rows == expected
    shown.clear()
    trainer(max_epochs=1, callbacks=[ChunkProgress(bar=False)]).fit(Watched(), datamodule=module(3, 2))
    assert set(shown) == {(None, None, None)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Exactly one of `data` and the loaders"),
        ({"data": Counted(), "train": ChunkedDataLoader(TRAIN, 2, 3)}, "Exactly one of `data` and the loaders"),
        ({"train": ChunkedDataLoader(TRAIN, 2, 3), "loader": {"batch_size": 2}}, "must be None without `data`"),
    ],
)
def test_contradicting_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PenstockDataModule(**options)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (
            lambda: ChunkedDataLoader(TRAIN, 2, 3),
            {"limit_train_batches": 2},
            "must use all 3 batches of an epoch, got 2",
        ),
        (lambda: ChunkedDataLoader(TRAIN, 2, 3, shuffle=False), {}, "same number of batches, got 1 to 3"),
        (
            lambda: ChunkedDataLoader(TRAIN, 2, 3, world=World(0, 2)),
            {},
            "must deal to the 1 ranks of the trainer, got 2",
        ),
    ],
)
def test_loaders_that_the_trainer_would_not_walk_whole_are_refused(loader: Any, options: Any, message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        trainer(max_epochs=1, **options).fit(Trained(), datamodule=PenstockDataModule(train=loader))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(LoaderError, match=r"No test loader\. Pass one to PenstockDataModule as test="):
        trainer().test(Model(), PenstockDataModule(train=ChunkedDataLoader(TRAIN, 2, 3)))
    with pytest.raises(LoaderError, match="endless stream"):
        trainer().test(Model(), PenstockDataModule(test=ChunkedDataLoader(TRAIN, 2, 3)))
    with pytest.raises(LoaderError, match=r"No test loader\."):
        PenstockDataModule(train=ChunkedDataLoader(TRAIN, 2, 3)).test_dataloader()


def given() -> PenstockDataModule:
    train, val = (TensorDataset(torch.tensor(part)) for part in (TRAIN, VAL))
    return PenstockDataModule(train=ChunkedDataLoader(train, 2, 3), val=ChunkedDataLoader(val, 2, 4, shuffle=False))


@pytest.mark.parametrize("make", [lambda: module(3, 4), given], ids=["data", "loaders"])
def test_batches_can_be_looked_at_without_a_trainer_and_do_not_count(make: Any) -> None:
    usual, data = fitted(make()), make()
    batches = iter(data.train_dataloader())
    looked = [next(batches)[0].tolist() for _ in range(2)]
    assert [batch[0].tolist() for batch in data.val_dataloader()] == cut(VAL)
    assert fitted(data).seen == usual.seen
    assert looked == epochs(usual.seen, "train")[0][:2]
