"""Chunks of a dataset: which items, in which order, and on which rank."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from penstock.core.errors import OptionError, ResumeError
from penstock.plan.world import World
from penstock.recipes.chunked.loader import ChunkedDataLoader, ChunkedSampler


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        if not 0 <= number < self.count:
            raise IndexError(number)
        return number


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


SIZES = st.tuples(st.integers(1, 60), st.integers(1, 80), st.integers(0, 99))


@given(SIZES, st.integers(1, 12))
def test_over_any_number_of_chunks_no_item_comes_two_times_more_often_than_another(
    sizes: tuple[int, int, int], chunks: int
) -> None:
    items, chunk, seed = sizes
    sampler = ChunkedSampler(items, chunk, seed)
    seen = Counter(dict.fromkeys(range(items), 0))
    for number in range(chunks):
        found = sampler.get_chunk_indices(number)
        assert len(found) == chunk
        seen.update(found)
    assert max(seen.values()) - min(seen.values()) <= 1
    assert set(seen) == set(range(items))


@given(SIZES, st.integers(1, 7))
def test_validation_sees_each_item_once_a_pass_in_order(sizes: tuple[int, int, int], batch: int) -> None:
    items, chunk, seed = sizes
    loader = ChunkedDataLoader(Numbers(items), batch, chunk, shuffle=False, seed=seed)
    for _ in range(2):
        one_pass = []
        for _ in range(loader.total_chunks):
            expected = len(loader)
            found = numbers(loader)
            assert len(found) == expected <= chunk
            one_pass += [item for part in found for item in part]
        assert one_pass == list(range(items))


def test_membership_of_chunks_changes_from_pass_to_pass_and_the_head_is_not_favoured() -> None:
    sampler = ChunkedSampler(100, 25, seed=3)
    passes = [[set(sampler.get_chunk_indices(4 * turn + chunk)) for chunk in range(4)] for turn in range(2)]
    assert all(set().union(*members) == set(range(100)) for members in passes)
    assert passes[0] != passes[1]


def test_a_chunk_is_a_pure_function_of_seed_and_number() -> None:
    one, other = ChunkedSampler(50, 8, seed=1), ChunkedSampler(50, 8, seed=1)
    assert one.get_chunk_indices(9) == other.get_chunk_indices(9)
    assert one.get_chunk_indices(9) != ChunkedSampler(50, 8, seed=2).get_chunk_indices(9)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_advances_when_a_chunk_is_through_and_not_before(workers: int) -> None:
    loader = ChunkedDataLoader(Numbers(30), 4, 3, seed=5, num_workers=workers, persistent_workers=workers > 0)
    iter(loader)
    assert loader.current_chunk == 0
    first = numbers(islice(loader, 2))
    assert loader.current_chunk == 0
    loader.set_chunk(0)
    assert numbers(loader)[:2] == first
    assert loader.current_chunk == 1
    assert [item for batch in numbers(loader) for item in batch] == loader.chunked.get_chunk_indices(1)


def test_workers_persist_over_chunks() -> None:
    loader = ChunkedDataLoader(Pids(), 1, 4, seed=1, num_workers=1, persistent_workers=True)
    assert len({pid for _ in range(3) for batch in loader for pid in batch.tolist()}) == 1


def test_workers_end_when_they_are_told_to_even_if_something_refers_to_them() -> None:
    loader = ChunkedDataLoader(Numbers(12), 1, 4, seed=1, num_workers=1, persistent_workers=True)
    assert len(numbers(loader)) == 4
    kept: Any = loader._iterator  # as Lightning keeps it, after an error in a hook
    workers = list(kept._workers)
    assert [worker.is_alive() for worker in workers] == [True]
    loader.end_workers()
    loader.end_workers()
    assert [worker.is_alive() for worker in workers] == [False]
    assert len(numbers(loader)) == 4
    loader.end_workers()


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return int(info.seed)


def test_ranks_walk_different_items_and_equally_many_batches() -> None:
    loaders = [ChunkedDataLoader(Numbers(40), 2, 6, seed=1, world=World(rank, 3)) for rank in range(3)]
    for chunk in range(4):
        found = [numbers(loader) for loader in loaders]
        assert [len(batches) for batches in found] == [2, 2, 2]
        together = [batch for step in zip(*found, strict=True) for batch in step]
        assert [item for batch in together for item in batch] == loaders[0].chunked.get_chunk_indices(chunk)


def test_without_a_chunk_size_it_is_a_plain_loader() -> None:
    for options in ({"shuffle": True}, {"shuffle": False}, {"drop_last": True}, {"sampler": [3, 1, 2]}):
        torch.manual_seed(3)
        ours = numbers(ChunkedDataLoader(Numbers(13), 4, **options))
        torch.manual_seed(3)
        assert ours == numbers(DataLoader(Numbers(13), 4, **options))
    loader = ChunkedDataLoader(Numbers(13), 4)
    assert isinstance(loader, DataLoader)
    assert (loader.is_chunked, loader.total_chunks, len(loader)) == (False, 1, 4)
    with pytest.raises(OptionError, match="to use chunks, got None"):
        loader.state_dict()


def test_drop_last_leaves_out_what_is_short_in_validation_only() -> None:
    assert numbers(ChunkedDataLoader(Numbers(7), 3, 5, shuffle=False, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]
    seen = [item for batch in ChunkedDataLoader(Numbers(7), 3, 7, drop_last=True) for item in batch.tolist()]
    assert sorted(seen) == sorted([*range(7)] * 3)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_empty_dataset_gives_no_batches(shuffle: bool) -> None:
    loader = ChunkedDataLoader(Numbers(0), 4, 3, shuffle=shuffle)
    assert (len(loader), numbers(loader)) == (0, [])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="chunk_size"):
        ChunkedDataLoader(Numbers(3), 1, 0)
    with pytest.raises(OptionError, match="sampler must be None with a chunk_size"):
        ChunkedDataLoader(Numbers(3), 1, 2, sampler=[0])
    with pytest.raises(OptionError, match="chunk_idx"):
        ChunkedSampler(3, 1).set_chunk(-1)


def test_the_info_says_where_it_stands() -> None:
    loader = ChunkedDataLoader(Numbers(10), 2, 2, seed=1)
    loader.set_chunk(6)
    assert loader.get_chunk_info() == {
        "current_chunk": 6,
        "total_chunks": 3,
        "chunk_size": 4,
        "dataset_size": 10,
        "samples_in_current_chunk": 4,
        "pass": 2,
        "chunk_of_pass": 1,
    }


def test_passes_that_are_cut_exactly_are_counted_by_their_chunks() -> None:
    loader = ChunkedDataLoader(Numbers(10), 2, 2, shuffle=False)
    found = []
    for chunk in range(7):
        loader.set_chunk(chunk)
        found.append((loader.get_chunk_info()["pass"], loader.get_chunk_info()["chunk_of_pass"], len(loader)))
    assert found == [(0, 0, 2), (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 1, 2), (1, 2, 1), (2, 0, 2)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_info_counts_in_whole_batches_if_the_batch_size_does_not_divide_the_chunk_size(shuffle: bool) -> None:
    sampler = ChunkedSampler(20, 5, shuffle=shuffle, batch_size=2)  # chunks of 3 batches: 6 items
    found = []
    for chunk in range(8):
        sampler.set_chunk(chunk)
        info = sampler.get_chunk_info()
        found.append((info["pass"], info["chunk_of_pass"]))
    items = [item for chunk in range(8) for item in sampler.get_chunk_indices(chunk)]
    assert len(items) == (48 if shuffle else 40)
    # Shuffled, chunks begin at items 0, 6, 12, 18, 24 (item 4 of pass 1), …; in order, every 4 chunks are a pass.
    shuffled = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert found == (shuffled if shuffle else [(chunk // 4, chunk % 4) for chunk in range(8)])


def test_the_chunks_of_a_pass_are_those_that_the_plan_cuts() -> None:
    sampler = ChunkedSampler(100, 5, shuffle=False, batch_size=2)  # 50 batches in chunks of 3
    assert sampler.total_chunks == 17
    seen = [item for chunk in range(17) for item in sampler.get_chunk_indices(chunk)]
    assert seen == list(range(100))


def test_a_loop_that_never_asks_for_the_end_gets_the_next_chunk_all_the_same() -> None:
    loader = ChunkedDataLoader(Numbers(12), 2, 2, shuffle=False)
    taken = [[batch.tolist() for batch in islice(loader, 2)] for _ in range(3)]
    assert taken == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


def test_a_state_of_another_dataset_of_the_same_size_is_refused_if_they_have_identities() -> None:
    class Named(Numbers):
        def __init__(self, identity: str) -> None:
            super().__init__(10)
            self.identity = identity

    state = ChunkedDataLoader(Named("one"), 2, 2).state_dict()
    ChunkedDataLoader(Named("one"), 2, 2).load_state_dict(state)
    with pytest.raises(ResumeError, match="the data"):
        ChunkedDataLoader(Named("other"), 2, 2).load_state_dict(state)
