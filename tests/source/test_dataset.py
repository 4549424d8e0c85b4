import pickle
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from penstock_source_suite import Case, ShortSuite, SourceSuite
from penstock_test_parts import Mishap, Numbers, Pairs, Records, Together, mishap_in_the_users_code

from penstock import DatasetSource, ReadError, SourceError, Span
from penstock.core.types import UNNAMED


class TestDatasets(ShortSuite):
    @pytest.fixture(
        params=[
            Numbers,
            Pairs,
            Records,
            Together,
            lambda n: list(range(100, 100 + n)),
            lambda n: [("a", i, np.float32(i)) for i in range(n)],
            lambda n: tuple([i, [i, {"deep": i}]] for i in range(n)),
            lambda n: np.arange(3 * n).reshape(n, 3),
            lambda n: torch.utils.data.TensorDataset(torch.arange(n), torch.arange(n) * 2),
            lambda n: torch.utils.data.Subset(Numbers(2 * n), range(n, 2 * n)),
            lambda n: [None if i % 2 else f"item {i}" for i in range(n)],
        ],
        ids=[
            "tensors",
            "tuples",
            "mappings",
            "getitems",
            "list",
            "tuples-in-list",
            "nested",
            "array",
            "TensorDataset",
            "Subset",
            "None",
        ],
    )
    def case(self, request: pytest.FixtureRequest) -> Case:
        dataset = request.param(17)
        return Case(
            lambda: DatasetSource(dataset),
            lambda item: {UNNAMED: dataset[item]},
            17,
            other=lambda: DatasetSource(request.param(18)),
        )


class TestThreadSafeDatasets(SourceSuite):
    @pytest.fixture
    def case(self) -> Case:
        return Case(
            lambda: DatasetSource(Pairs(17), thread_safe=True),
            lambda item: {UNNAMED: Pairs(17)[item]},
            17,
            other=lambda: DatasetSource(Pairs(18), thread_safe=True),
        )


def test_a_dataset_with_getitems_gets_one_call_per_batch() -> None:
    dataset = Together(10)
    found = DatasetSource(dataset).take(np.array([4, 1, 1]))[UNNAMED]
    assert ([int(item) for item in found], dataset.asked) == ([4, 1, 1], [[4, 1, 1]])


def test_a_dataset_of_another_class_has_another_identity() -> None:
    assert DatasetSource(Numbers(5)).index.digest != DatasetSource(Pairs(5)).index.digest


class Crowded:
    """Records whether two threads called it at once."""

    def __init__(self, parties: int) -> None:
        self.inside, self.most, self.lock = 0, 0, threading.Lock()
        self.together = threading.Barrier(parties)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        with suppress(threading.BrokenBarrierError):
            self.together.wait(0.2)
        with self.lock:
            self.inside -= 1
        return i


@pytest.mark.parametrize(("thread_safe", "at_once"), [(False, 1), (True, 2)])
def test_threads_take_turns_unless_the_dataset_is_thread_safe(thread_safe: bool, at_once: int) -> None:
    dataset = Crowded(parties=2)
    source = DatasetSource(dataset, thread_safe=thread_safe)
    threads = [threading.Thread(target=source.take, args=(np.array([n]),)) for n in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dataset.most == at_once


def test_items_keep_their_type_even_if_they_could_be_a_matrix() -> None:
    column = DatasetSource([(1, 2), (3, 4)]).read(Span(0, 2))[UNNAMED]
    assert (column.shape, column.tolist()) == ((2,), [(1, 2), (3, 4)])


class Liar(Numbers):
    """Has fewer items than its length."""

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("read", [lambda s: s.take(np.array([3, 12])), lambda s: s.read(Span(9, 13))])
def test_getitem_out_of_range_within_the_length_is_a_read_error_that_names_the_item(read: Any) -> None:
    with pytest.raises(ReadError, match=r"Item 12 of DatasetSource\(Liar\).*length is 20") as caught:
        read(DatasetSource(Liar(12)))
    assert isinstance(caught.value.__cause__, IndexError)


class LiarTogether(Together):
    def __len__(self) -> int:
        return 20


def test_getitems_out_of_range_within_the_length_is_a_read_error_that_names_the_items() -> None:
    with pytest.raises(ReadError, match=r"(?s)LiarTogether.*3.*12|3.*12.*LiarTogether"):
        DatasetSource(LiarTogether(12)).take(np.array([3, 12]))


class Stingy(Together):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return super().__getitems__(numbers[:-1])


class Lavish(Together):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return super().__getitems__([*numbers, 0])


@pytest.mark.parametrize(("dataset", "gave"), [(Stingy(9), 3), (Lavish(9), 5)])
def test_getitems_that_returns_another_number_of_items_is_a_read_error(dataset: Any, gave: int) -> None:
    with pytest.raises(ReadError, match=f"{type(dataset).__name__}.*4 expected, got {gave}"):
        DatasetSource(dataset).take(np.arange(4))


class Broken(Numbers):
    def __getitem__(self, i: int) -> Any:
        if i == 5:
            mishap_in_the_users_code("dataset", i)
        return i


class BrokenTogether(Broken):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[i] for i in numbers]


@pytest.mark.parametrize("kind", [Broken, BrokenTogether])
def test_an_error_of_the_dataset_is_raised_unchanged_with_a_note_about_the_item(kind: Any) -> None:
    with pytest.raises(Mishap) as caught:
        DatasetSource(kind(9)).take(np.array([3, 5]))
    assert caught.value.item == 5
    assert any("5" in note and kind.__name__ in note for note in caught.value.__notes__)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, i: int) -> int:
        return i


@pytest.mark.parametrize(
    "given", [Stream(), NoLength(), iter([1]), {1, 2}, 5, None], ids=lambda given: type(given).__name__
)
def test_an_object_without_len_or_getitem_is_refused_by_name(given: Any) -> None:
    with pytest.raises(SourceError, match=type(given).__name__):
        DatasetSource(given)


@pytest.mark.parametrize("empty", [[], Numbers(0), ()], ids=lambda given: type(given).__name__)
def test_a_dataset_of_length_0_is_refused(empty: Any) -> None:
    with pytest.raises(SourceError, match="at least one item"):
        DatasetSource(empty)


def test_a_pickled_source_still_takes_turns() -> None:
    source = pickle.loads(pickle.dumps(DatasetSource(Pairs(4))))
    assert source.take(np.array([3]))[UNNAMED][0][1] == 3
