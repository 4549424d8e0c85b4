"""What is done for each draw, wherever it is done: read, transform, merge into a batch."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source, Transform
from penstock.core.seeds import generator_for
from penstock.core.types import UNNAMED, Block, Draw, Span
from penstock.run.buffers import BufferPool
from penstock.run.windows import WindowStore

__all__ = ["Failure", "Record", "Work"]

Record = Callable[[str, float, int], None]
"""Told of each stage: its name, seconds, bytes."""

_Mask = NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands in the place of a batch that could not be made."""

    error: BaseException


@dataclass(frozen=True)
class Work:
    """Makes batches out of draws. Pickles as a specification: each process has buffers and windows of its own.

    1. A read, the transform or the merging of a draw fails: a Failure stands in its place, nothing follows it, and the
       error says which draw and which item it was.
    """

    source: Source
    seed: int
    transform: Transform | None
    merge_block: Callable[[Block, _Mask], Any] | None
    """Makes a batch of a block as it was read; None where items are merged one by one."""

    merge_items: Callable[[list[Any], _Mask], Any]
    """Makes a batch of items."""

    windows_held: int
    allocate: Callable[[int], NDArray[np.uint8]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pool", "_windows")}

    def batches(self, draws: Sequence[Draw], record: Record) -> Iterator[Any]:
        """Yield the batch of each draw, or a Failure and nothing more."""
        blocks: Iterator[Block] = (self._read(draw, record) for draw in draws)
        if len(draws) > 1:
            try:
                blocks = iter(self._read_together(draws, record))
            except Exception:
                # Read one by one instead: those before the bad one are delivered, and the bad one gets the blame.
                blocks = (self._read(draw, record) for draw in draws)
        for draw in draws:
            try:
                batch = self._merged(next(blocks), draw, record)
            except BaseException as error:  # also an exit that the user's code asks for: it must not vanish in a worker
                yield Failure(error)
                return
            yield batch

    @cached_property
    def _pool(self) -> BufferPool | None:
        fixed = {name: field for name, field in self.source.fields.items() if field.item_bytes is not None}
        return BufferPool(fixed, self.allocate) if fixed else None

    @cached_property
    def _windows(self) -> WindowStore:
        return WindowStore(self.source, self._room, self.windows_held)

    def _room(self, n_items: int) -> dict[str, NDArray[Any]] | None:
        return self._pool.lend(n_items) if self._pool is not None else None

    def prepare(self, draw: Draw) -> None:
        """Read ahead the windows of `draw`."""
        for part in draw.parts:
            self._windows.get(part.window)

    def _read(self, draw: Draw, record: Record) -> Block:
        began = time.perf_counter()
        try:
            block = self._from_windows(draw) if draw.parts else self._direct(draw.items)
        except Exception as error:
            error.add_note(f"[penstock] while reading {_named(draw)} from {self.source!r}")
            raise
        record("read", time.perf_counter() - began, _n_bytes(block))
        return block

    def _read_together(self, draws: Sequence[Draw], record: Record) -> list[Block]:
        if any(draw.parts for draw in draws):
            return [self._read(draw, record) for draw in draws]
        began = time.perf_counter()
        block = self._direct(np.concatenate([draw.items for draw in draws]))
        record("read", time.perf_counter() - began, _n_bytes(block))
        ends = np.cumsum([len(draw) for draw in draws]).tolist()
        return [
            {name: array[end - len(draw) : end] for name, array in block.items()}
            for draw, end in zip(draws, ends, strict=True)
        ]

    def _direct(self, items: NDArray[np.int64]) -> Block:
        out = self._room(len(items))
        if len(items) > 1 and items[-1] - items[0] == len(items) - 1 and (np.diff(items) == 1).all():
            return self.source.read(Span(int(items[0]), int(items[-1]) + 1), out)
        return self.source.take(items, out)

    def _from_windows(self, draw: Draw) -> Block:
        first = draw.parts[0]
        if len(draw.parts) == 1 and len(first.rows) == len(first.window) and (np.diff(first.rows) == 1).all():
            return self._direct(draw.items)  # the whole window, as it lies: nothing to keep for another draw
        room = self._room(len(draw)) or {}
        block = {name: room[name] if name in room else np.empty(len(draw), object) for name in self.source.fields}
        for part in draw.parts:
            window = self._windows.get(part.window)
            for name, array in block.items():
                place = array[part.at : part.at + len(part.rows)]
                np.take(window[name], part.rows, axis=0, out=place, mode="clip")
        return block

    def _merged(self, block: Block, draw: Draw, record: Record) -> Any:
        items = [] if self.merge_block is not None else _items(block)
        began = time.perf_counter()
        if self.transform is not None:
            items = [self._transformed(item, draw, row) for row, item in enumerate(items)]
            record("transform", time.perf_counter() - began, 0)
            began = time.perf_counter()
        try:
            merge = self.merge_block
            batch = self.merge_items(items, draw.mask) if merge is None else merge(block, draw.mask)
        except Exception as error:
            error.add_note(f"[penstock] while merging {_named(draw)}")
            raise
        record("collate", time.perf_counter() - began, 0)
        return batch

    def _transformed(self, item: Any, draw: Draw, row: int) -> Any:
        assert self.transform is not None, "called only with a transform"
        try:
            return self.transform(item, generator_for(self.seed, "augment", *draw.seed_path(row)))
        except Exception as error:
            where = f"item {draw.items[row]} of batch {draw.batch}, epoch {draw.epoch}"
            error.add_note(f"[penstock] while transforming {where}")
            raise


def _named(draw: Draw) -> str:
    items = ", ".join(map(str, draw.items[:8].tolist())) + (", …" if len(draw) > 8 else "")
    return f"batch {draw.batch} of epoch {draw.epoch} (items {items})"


def _items(block: Block) -> list[Any]:
    if UNNAMED in block:
        return list(block[UNNAMED])
    count = len(next(iter(block.values())))
    return [{name: array[row] for name, array in block.items()} for row in range(count)]


def _n_bytes(block: Block) -> int:
    return sum(array.nbytes for array in block.values())
