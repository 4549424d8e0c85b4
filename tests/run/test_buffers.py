import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Field
from penstock.run.buffers import BufferPool


def field(dtype: str, *shape: int) -> Field:
    return Field(np.dtype(dtype), shape)


FIELDS = {"x": field("f4", 3), "flag": field("?"), "wide": field("c16", 2, 2), "none": field("u2", 0)}


class Allocations:
    """Notes what was allocated."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, n_bytes: int) -> np.ndarray:
        self.sizes.append(n_bytes)
        return np.zeros(n_bytes, np.uint8)


def address(array: Any) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("n_items", [0, 1, 5, 64])
def test_blocks_have_the_dtypes_and_shapes_of_the_fields(n_items: int) -> None:
    block = BufferPool(FIELDS).lend(n_items)
    assert {name: (array.dtype, array.shape) for name, array in block.items()} == {
        name: (entry.dtype, (n_items, *entry.shape)) for name, entry in FIELDS.items()
    }


def test_fields_do_not_overlap() -> None:
    block = BufferPool(FIELDS).lend(7)
    for number, array in enumerate(block.values()):
        array[...] = number
    for number, array in enumerate(block.values()):
        assert (array == np.full_like(array, number)).all()


@pytest.mark.parametrize("n_items", [1, 3, 17])
def test_every_field_begins_at_a_cache_line(n_items: int) -> None:
    pool = BufferPool(FIELDS)
    kept = [pool.lend(n_items) for _ in range(4)]
    assert {address(block[name]) % 64 for block in kept for name in ("x", "flag", "wide")} == {0}


def test_memory_is_reused_when_its_block_is_dropped() -> None:
    allocations = Allocations()
    pool = BufferPool(FIELDS, allocations)
    places = set()
    for _ in range(20):
        block = pool.lend(8)
        places.add(address(block["x"]))
        del block
    assert (len(places), len(allocations.sizes)) == (1, len(FIELDS))


def test_memory_of_another_size_is_kept_apart() -> None:
    allocations = Allocations()
    pool = BufferPool(FIELDS, allocations)
    for n_items in (64, 6400, 64, 6400, 64):
        pool.lend(n_items)
    assert len(allocations.sizes) == 2 * len(FIELDS) - 1, "a field without bytes needs one buffer"


def test_a_smaller_block_gets_the_head_of_a_free_buffer_that_is_at_most_twice_as_large() -> None:
    allocations = Allocations()
    pool = BufferPool({"x": field("f8", 8)}, allocations)
    for n_items in (100, 60, 100, 50, 51, 100):
        array = pool.lend(n_items)["x"]
        assert (array.shape, array.flags.c_contiguous) == ((n_items, 8), True)
        array[...] = n_items
        del array
    assert allocations.sizes == [6400]
    pool.lend(49)
    assert allocations.sizes == [6400, 49 * 64]


def test_blocks_of_any_sizes_at_once_have_memory_each() -> None:
    pool = BufferPool({"x": field("i8", 4)})
    for _ in range(3):
        blocks = [pool.lend(n_items)["x"] for n_items in (10, 6, 9, 30, 8, 5)]
        for number, block in enumerate(blocks):
            block[...] = number
        assert [set(block.ravel().tolist()) for block in blocks] == [{number} for number in range(6)]
        del block, blocks


def test_buffers_of_sizes_that_grow_or_shrink_or_vary_are_not_all_kept() -> None:
    allocated: list[weakref.ref[Any]] = []

    def allocate(n_bytes: int) -> np.ndarray:
        memory = np.zeros(n_bytes, np.uint8)
        allocated.append(weakref.ref(memory))
        return memory

    pool = BufferPool({"x": field("u1", 64)}, allocate)
    rng = np.random.default_rng(0)
    for sizes in (range(100, 400), range(400, 100, -1), rng.integers(100, 400, 300).tolist()):
        for n_items in sizes:
            pool.lend(n_items)
        kept = [memory.size for ref in allocated if (memory := ref()) is not None]
        assert sum(kept) <= 2 * 64 * 400


@pytest.mark.parametrize(
    "looking",
    [
        lambda block: block["x"],
        lambda block: block["x"][2:3],
        lambda block: block["x"].reshape(-1).view("i4")[5:],
        lambda block: torch.from_numpy(block["x"]),
        lambda block: torch.from_numpy(block["x"])[1, :2],
        lambda block: torch.from_numpy(block["x"]).untyped_storage(),
        lambda block: memoryview(block["x"]),
    ],
    ids=["array", "slice", "view", "tensor", "tensor-view", "storage", "memoryview"],
)
def test_memory_is_not_lent_again_while_a_view_of_it_is_alive(looking: Any) -> None:
    allocations = Allocations()
    pool = BufferPool(FIELDS, allocations)
    block = pool.lend(8)
    taken = address(block["x"])
    kept = looking(block)
    del block
    others = [pool.lend(8) for _ in range(5)]
    assert taken not in {address(other["x"]) for other in others}
    del kept
    assert address(pool.lend(8)["x"]) == taken


def test_a_kept_block_is_not_overwritten() -> None:
    pool = BufferPool({"x": field("i8", 4)})
    kept = []
    for number in range(50):
        block = pool.lend(3)
        block["x"][...] = number
        if number % 3 == 0:
            kept.append((number, torch.from_numpy(block["x"])[1]))
    assert [(number, [number] * 4) for number, _ in kept] == [(number, row.tolist()) for number, row in kept]


def test_a_block_outlives_its_pool() -> None:
    pool = BufferPool({"x": field("i8")})
    block = pool.lend(1000)
    block["x"][...] = np.arange(1000)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    filler = [np.full(1000, 7) for _ in range(20)]
    assert block["x"].tolist() == list(range(1000))
    del filler, block


def test_a_block_dropped_on_another_thread_returns_to_the_pool() -> None:
    allocations = Allocations()
    pool = BufferPool(FIELDS, allocations)
    held = [pool.lend(8)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    pool.lend(8)
    assert len(allocations.sizes) == len(FIELDS)


def test_a_kept_field_keeps_no_other_field() -> None:
    allocations = Allocations()
    pool = BufferPool({"image": field("u1", 100_000), "label": field("i8", 20_000)}, allocations)
    labels = [pool.lend(4)["label"] for _ in range(10)]
    assert allocations.sizes.count(400_000) == 1
    assert len(labels) == allocations.sizes.count(640_000)


def test_small_fields_are_allocated_and_not_lent() -> None:
    pool = BufferPool({"label": field("i8")})
    first = pool.lend(4)["label"]
    assert first.base is not None
    assert first.base.nbytes <= 4 * 8 + 64, "it keeps no more than itself"


def test_threads_never_get_the_same_memory() -> None:
    pool = BufferPool({"x": field("i8", 16)})
    failures: list[str] = []

    def use(number: int) -> None:
        kept = []
        for turn in range(300):
            block = pool.lend(4)
            mark = number * 1000 + turn
            block["x"][...] = mark
            kept.append((mark, block["x"][::2]))
            if len(kept) > turn % 5:
                expected, array = kept.pop(0)
                if not (array == expected).all():
                    failures.append(f"{expected} became {array.ravel()[:4]}")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_free_memory_does_not_pile_up() -> None:
    sizes: list[Any] = []

    def allocate(n_bytes: int) -> np.ndarray:
        memory = np.zeros(n_bytes, np.uint8)
        sizes.append(weakref.ref(memory))
        return memory

    pool = BufferPool({"x": field("u1", 100)}, allocate)
    blocks = [pool.lend(10) for _ in range(40)]
    assert sum(memory() is not None for memory in sizes) == 40
    blocks.clear()
    assert sum(memory() is not None for memory in sizes) <= 8
