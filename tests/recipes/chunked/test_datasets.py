"""Data modules and training loops in chunks, in every configuration of chunk sizes and limits."""

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from penstock.core.errors import LoaderError, OptionError, ResumeError
from penstock.plan.world import World
from penstock.recipes.chunked.datasets import (
    ChunkedSequenceDataset,
    ChunkSizes,
    SequenceDataset,
    resolve_chunk_sizes,
)
from penstock.recipes.chunked.training import ChunkedTrainingMixin

LIMITS = {"limit_train_batches": 2, "limit_val_batches": 1}


class Counted(ChunkedSequenceDataset):
    """100 numbers for training, 30 for validation, 10 for testing."""

    def setup(self) -> None:
        self.dataset_train = TensorDataset(torch.arange(100))
        self.dataset_val = TensorDataset(torch.arange(100, 130))
        self.dataset_test = TensorDataset(torch.arange(130, 140))


class Loop(ChunkedTrainingMixin):
    def __init__(self, config: Any, data: ChunkedSequenceDataset) -> None:
        self.data = data
        super().__init__(config)

    def training_step(self, batch: Any) -> list[int]:
        return batch[0].tolist()

    def validation_step(self, batch: Any) -> list[int]:
        return batch[0].tolist()


def looped(train: dict[str, Any], **sections: Any) -> Loop:
    data = Counted()
    data.setup()
    return Loop({"train": train, "loader": {"batch_size": 4}, **sections}, data)


@pytest.mark.parametrize(
    ("train", "val", "sizes"),
    [
        (None, None, ChunkSizes(None, None)),
        (5, None, ChunkSizes(5, 8)),
        (None, 2, ChunkSizes(25, 2)),
        (5, 2, ChunkSizes(5, 2)),
    ],
)
@pytest.mark.parametrize("limits", [None, LIMITS, {"limit_train_batches": 1.0}])
def test_either_size_turns_chunks_on_and_the_other_partition_runs_whole(
    train: int | None, val: int | None, sizes: ChunkSizes, limits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        found = resolve_chunk_sizes(train, val, train_batches=25, val_batches=8, limits=limits)
    assert found == sizes
    warned = [record.getMessage() for record in caplog.records]
    if sizes.enabled and limits == LIMITS:
        assert len(warned) == 1
        assert "limit_train_batches=2, limit_val_batches=1: ignored" in warned[0]
    else:
        assert warned == []


def test_only_the_train_size_walks_all_of_training_in_chunks_and_validates_whole_after_each() -> None:
    loop = looped({"train_chunk_size": 5}, trainer=LIMITS)
    results = [loop.train_epoch_with_chunking() for _ in range(5)]
    assert sorted(item for result in results for batch in result["train"] for item in batch) == list(range(100))
    for number, result in enumerate(results):
        assert (result["train_chunk"], result["total_chunks"], result["train_batches"]) == (number, 5, 5)
        assert [item for batch in result["val"] for item in batch] == list(range(100, 130))


def test_only_the_val_size_validates_in_chunks_and_trains_on_all() -> None:
    loop = looped({"val_chunk_size": 3})
    results = [loop.train_epoch_with_chunking() for _ in range(3)]
    for result in results:
        assert sorted(item for batch in result["train"] for item in batch) == list(range(100))
    assert [item for result in results for batch in result["val"] for item in batch] == list(range(100, 130))


def test_both_sizes_are_what_they_say() -> None:
    loop = looped({"train_chunk_size": 3, "val_chunk_size": 2})
    assert [(r["train_batches"], r["val_batches"]) for r in (loop.train_epoch_with_chunking() for _ in range(5))] == [
        (3, 2), (3, 2), (3, 2), (3, 2), (3, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["trainer", "train"])
def test_without_sizes_limits_hold_and_batches_are_those_of_a_plain_loader(where: str) -> None:
    loop = looped(LIMITS, loader={"batch_size": 4}) if where == "train" else looped({}, trainer=LIMITS)
    torch.manual_seed(1)
    found = [loop.train_epoch_with_chunking() for _ in range(2)]
    torch.manual_seed(1)
    plain = DataLoader(TensorDataset(torch.arange(100)), batch_size=4, shuffle=True)
    validation = DataLoader(TensorDataset(torch.arange(100, 130)), batch_size=4)
    expected = []
    for _ in range(2):
        batches = iter(plain)
        train = [next(batches)[0].tolist() for _ in range(2)]
        expected.append((train, [next(iter(validation))[0].tolist()]))
    assert [(result["train"], result["val"]) for result in found] == expected


def test_the_test_partition_is_always_whole() -> None:
    data = Counted(train_chunk_size=1, val_chunk_size=1)
    data.setup()
    assert [batch[0].tolist() for batch in data.test_dataloader(batch_size=4)] == [
        [130, 131, 132, 133], [134, 135, 136, 137], [138, 139]
    ]  # fmt: skip


def test_a_module_goes_on_where_its_state_was_taken() -> None:
    data = Counted(train_chunk_size=4)
    data.setup()
    train = data.train_dataloader(batch_size=4)
    whole = [batch[0].tolist() for _ in range(3) for batch in train]
    again = Counted(train_chunk_size=4)
    again.setup()
    other = again.train_dataloader(batch_size=4)
    batches = iter(other)
    for _ in range(3):
        next(batches)
    state = again.state_dict()
    last = Counted(train_chunk_size=4)
    last.setup()
    rest = last.train_dataloader(batch_size=4)
    last.load_state_dict(state)
    assert [batch[0].tolist() for _ in range(3) for batch in rest] == whole[3:]
    assert last.current_train_chunk == 3


def test_what_is_asked_for_before_setup_says_so() -> None:
    with pytest.raises(LoaderError, match=r"setup\(\)"):
        Counted(train_chunk_size=4).train_dataloader(batch_size=2)
    with pytest.raises(NotImplementedError, match=r"must define setup\(\)"):
        SequenceDataset().setup()
    with pytest.raises(OptionError, match="train_chunk_size"):
        resolve_chunk_sizes(0, None, train_batches=1, val_batches=1)


def test_a_split_is_the_same_for_the_same_seed_and_covers_all() -> None:
    def parts(seed: int) -> tuple[list[int], list[int]]:
        data = Counted(seed=seed)
        data.setup()
        data.split_train_val(0.2)
        return [data.dataset_train[i][0].item() for i in range(80)], [data.dataset_val[i][0].item() for i in range(20)]

    train, val = parts(1)
    assert sorted(train + val) == list(range(100))
    assert parts(1) == (train, val)
    assert parts(2) != (train, val)


def ask_each_epoch(data: ChunkedSequenceDataset, name: str, epochs: int, **loader: Any) -> list[list[int]]:
    """The items of each epoch of a loop that asks for its loader again and again."""
    return [
        [item for batch in getattr(data, f"{name}_dataloader")(batch_size=4, **loader) for item in batch[0].tolist()]
        for _ in range(epochs)
    ]


def make_data(train: int, val: int | None = None) -> Counted:
    data = Counted(train, val)
    data.setup()
    data.dataset_train = TensorDataset(torch.arange(96))
    return data


@pytest.mark.parametrize("loader", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loop_that_asks_for_the_loader_each_epoch_sees_all_items(loader: dict[str, Any]) -> None:
    data = make_data(6, 3)
    one = make_data(6, 3).train_dataloader(batch_size=4)
    found = ask_each_epoch(data, "train", 5, **loader)
    assert found == [[item for batch in one for item in batch[0].tolist()] for _ in range(5)]
    assert sorted(item for items in found[:4] for item in items) == list(range(96))
    assert ask_each_epoch(data, "val", 4) == [
        list(range(100, 112)), list(range(112, 124)), list(range(124, 130)), list(range(100, 112))
    ]  # fmt: skip
    assert (data.current_train_chunk, data.current_val_chunk) == (5, 4)


def test_a_loop_that_asks_each_epoch_resumes_in_the_middle_of_one() -> None:
    whole = ask_each_epoch(make_data(6), "train", 4)
    data = make_data(6)
    ask_each_epoch(data, "train", 1)
    batches = iter(data.train_dataloader(batch_size=4))
    taken = [item for _ in range(2) for item in next(batches)[0].tolist()]
    state = data.state_dict()
    assert taken == whole[1][:8]
    resumed = make_data(6)
    resumed.load_state_dict(state)  # before there is a loader
    assert (resumed.current_train_chunk, resumed.state_dict()) == (1, state)
    assert ask_each_epoch(resumed, "train", 3) == [whole[1][8:], *whole[2:]]
    resumed.load_state_dict(state)
    assert ask_each_epoch(resumed, "train", 1) == [whole[1][8:]]
    with pytest.raises(ResumeError, match="must be what state_dict"):
        resumed.load_state_dict(state["train"])


def test_rewinding_starts_at_the_first_chunk_again() -> None:
    data = make_data(6)
    first = ask_each_epoch(data, "train", 2)
    data.rewind()
    assert data.current_train_chunk == 0
    assert ask_each_epoch(data, "train", 2) == first


def test_a_loader_of_another_rank_continues_and_one_with_other_batches_says_that_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = ask_each_epoch(make_data(6), "train", 2)
    data = make_data(6)
    ask_each_epoch(data, "train", 1)
    batches = [whole[1][start : start + 4] for start in range(0, 24, 4)]
    assert ask_each_epoch(data, "train", 1, world=World(1, 2)) == [[item for batch in batches[1::2] for item in batch]]
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, "penstock"):
        other = data.train_dataloader(batch_size=8)
    assert "starts at its first chunk" in caplog.text
    assert "batch_size changed from 4 to 8" in caplog.text
    assert other.current_chunk == 0


def test_a_loop_says_what_it_needs() -> None:
    class Empty(ChunkedTrainingMixin):
        def __init__(self, config: Any = None, data: Any = None) -> None:
            if data is not None:
                self.data = data
            if config is not None:
                super().__init__(config)

    chunks = {"train": {"train_chunk_size": 2}}
    with pytest.raises(LoaderError, match=r"Empty\.data must be a ChunkedSequenceDataset, got none\. Set self"):
        Empty(chunks)
    with pytest.raises(LoaderError, match="must be a ChunkedSequenceDataset, got SequenceDataset"):
        Empty(chunks, SequenceDataset())
    with pytest.raises(LoaderError, match="must be a SequenceDataset, got list"):
        Empty({}, [1]).train_epoch_with_chunking()
    with pytest.raises(LoaderError, match=r"must call ChunkedTrainingMixin\.__init__\(self, config\)"):
        Empty().train_epoch_with_chunking()
    with pytest.raises(LoaderError, match=r"dataset_train must be set .* Set it in setup\(\)"):
        Empty(chunks, Counted()).train_epoch_with_chunking()
    looping = Empty(chunks, make_data(6))
    with pytest.raises(NotImplementedError, match=r"Empty must define training_step"):
        looping.train_epoch_with_chunking()


@pytest.mark.parametrize(("name", "shuffle"), [("train", False), ("val", True), ("test", True)])
def test_a_shuffle_that_chunks_contradict_is_refused(name: str, shuffle: bool) -> None:
    data = make_data(4, 2)
    make = getattr(data, f"{name}_dataloader")
    assert len(make(batch_size=2, shuffle=not shuffle)) == len(make(batch_size=2))
    with pytest.raises(OptionError, match=rf"got shuffle={shuffle} for the {name} loader\. Leave it out"):
        make(batch_size=2, shuffle=shuffle)
