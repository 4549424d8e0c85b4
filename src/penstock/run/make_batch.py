"""Make a batch from a draw: read its items, transform them, collate them. Shared by all executors."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import LoaderError
from penstock.core.protocols import Source, Transform
from penstock.core.seeds import generator_for
from penstock.core.types import UNNAMED, Block, Draw, Span
from penstock.run.buffers import BufferPool, FieldLayout
from penstock.run.pages import Pages
from penstock.run.windows import WindowStore

__all__ = ["BatchMaker", "Failure", "Lend", "Record"]

Record = Callable[[str, float, int], None]
"""Receives the name, seconds and bytes of each stage that ends."""

Lend = Callable[[int], Block | None]
"""Returns arrays of that many items, for all fields of fixed shape; None if there are none."""

_Mask = NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Takes the place of a batch that could not be made."""

    error: BaseException


@dataclass(frozen=True)
class BatchMaker:
    """Makes batches from draws. Pickles as a specification: each process has its own buffers and shuffle windows.

    1. Reading, transforming or collating a draw fails: a Failure takes the place of its batch, nothing follows it, and
       the error names the draw and the item.
    2. It raises StopIteration, StopAsyncIteration or GeneratorExit, which would end a loop in silence: LoaderError.
    3. It raises SystemExit or KeyboardInterrupt: these arrive as themselves, out of a thread or a worker, too.
    """

    source: Source
    seed: int
    transform: Transform | None
    collate_block: Callable[[Block, _Mask], Any] | None
    """Makes a batch from a whole block; None if items are collated one by one."""

    collate_items: Callable[[list[Any], Draw], Any]
    """Makes a batch from a list of items, and the draw that they come from."""

    windows_held: int
    allocate: Callable[[int], NDArray[np.uint8]] | None = None
    pages: Pages = field(default_factory=Pages)
    """What is read ahead of the batches, and given back after them."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pool", "_windows")}

    def make_batches(self, draws: Sequence[Draw], record: Record, lend: Lend | None = None) -> Iterator[Any]:
        """Yield the batch of each draw, up to the first Failure.

        Parameters
        ----------
        lend
            Lends the memory of blocks that no code of the user gets to see; None: reusable memory of this process.
        """
        if lend is None or self.collate_block is None:
            lend = self._lend_block
        blocks: Iterator[Block] = (self._read(draw, record, lend) for draw in draws)
        if len(draws) > 1:
            try:
                blocks = iter(self._read_many(draws, record, lend))
            except Exception:
                # Read one by one instead: the draws before the bad one are delivered, and the error names the bad one.
                blocks = (self._read(draw, record, lend) for draw in draws)
            except BaseException as error:
                yield Failure(error)
                return
        for draw in draws:
            try:
                batch = self._collate(next(blocks), draw, record)
            except BaseException as error:  # SystemExit in the user's code, too: it must not vanish in a worker
                yield Failure(error)
                return
            yield batch

    def read_windows(self, draw: Draw) -> None:
        """Read the shuffle windows of `draw` ahead of its batch."""
        for part in draw.parts:
            self._windows.get(part.window)

    @property
    def layout(self) -> FieldLayout | None:
        """Where the fields of a block lie in its memory; None if no field has a fixed shape."""
        return self._pool.layout if self._pool is not None else None

    @cached_property
    def _pool(self) -> BufferPool | None:
        fixed = {name: field for name, field in self.source.fields.items() if field.item_bytes is not None}
        return BufferPool(fixed, self.allocate) if fixed else None

    @cached_property
    def _windows(self) -> WindowStore:
        return WindowStore(self.source, self._lend_block, self.windows_held, self.pages)

    def _lend_block(self, n_items: int) -> Block | None:
        return self._pool.lend(n_items) if self._pool is not None else None

    def _read(self, draw: Draw, record: Record, lend: Lend) -> Block:
        began = time.perf_counter()
        try:
            block = self._read_from_windows(draw, lend) if draw.parts else self._read_draw(draw, lend)
        except BaseException as error:
            _raise_named(error, f"while reading {_describe(draw)} from {self.source!r}")
        record("read", time.perf_counter() - began, _n_bytes(block))
        return block

    def _read_many(self, draws: Sequence[Draw], record: Record, lend: Lend) -> list[Block]:
        if any(draw.parts for draw in draws):
            return [self._read(draw, record, lend) for draw in draws]
        began = time.perf_counter()
        try:
            items = np.concatenate([draw.items for draw in draws])
            block = self._read_items(items, lend)
            self.pages.give_back(self.source, items, draws[0].epoch)
        except Exception:
            raise  # which of them it is shows when they are read one by one
        except BaseException as error:
            _raise_named(error, f"while reading {_describe(draws[0])}, and the {len(draws) - 1} after it")
        record("read", time.perf_counter() - began, _n_bytes(block))
        ends = np.cumsum([len(draw) for draw in draws]).tolist()
        return [
            {name: array[end - len(draw) : end] for name, array in block.items()}
            for draw, end in zip(draws, ends, strict=True)
        ]

    def _read_draw(self, draw: Draw, lend: Lend) -> Block:
        block = self._read_items(draw.items, lend)
        self.pages.give_back(self.source, draw.items, draw.epoch)
        return block

    def _read_items(self, items: NDArray[np.int64], lend: Lend) -> Block:
        out = lend(len(items))
        if len(items) > 1 and items[-1] - items[0] == len(items) - 1 and (np.diff(items) == 1).all():
            return self.source.read(Span(int(items[0]), int(items[-1]) + 1), out)
        return self.source.take(items, out)

    def _read_from_windows(self, draw: Draw, lend: Lend) -> Block:
        first = draw.parts[0]
        if len(draw.parts) == 1 and len(first.rows) == len(first.window) and (np.diff(first.rows) == 1).all():
            return self._read_draw(draw, lend)  # the whole window in order: nothing to keep for another draw
        lent = lend(len(draw)) or {}
        block = {name: lent[name] if name in lent else np.empty(len(draw), object) for name in self.source.fields}
        for part in draw.parts:
            window = self._windows.get(part.window)
            for name, array in block.items():
                place = array[part.at : part.at + len(part.rows)]
                np.take(window[name], part.rows, axis=0, out=place, mode="clip")
        return block

    def _collate(self, block: Block, draw: Draw, record: Record) -> Any:
        items = [] if self.collate_block is not None else _split_items(block)
        began = time.perf_counter()
        if self.transform is not None:
            items = [self._apply_transform(item, draw, row) for row, item in enumerate(items)]
            record("transform", time.perf_counter() - began, 0)
            began = time.perf_counter()
        try:
            collate = self.collate_block
            batch = self.collate_items(items, draw) if collate is None else collate(block, draw.mask)
        except BaseException as error:
            _raise_named(error, f"while collating {_describe(draw)}")
        record("collate", time.perf_counter() - began, 0)
        return batch

    def _apply_transform(self, item: Any, draw: Draw, row: int) -> Any:
        assert self.transform is not None, "called only with a transform"
        try:
            return self.transform(item, generator_for(self.seed, "augment", *draw.seed_path(row)))
        except BaseException as error:
            _raise_named(error, f"while transforming item {draw.items[row]} of batch {draw.batch}, epoch {draw.epoch}")


def _raise_named(error: BaseException, where: str) -> NoReturn:
    """Raise the error of a user's code with a note that says where; one that would end a loop, as LoaderError."""
    if isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
        raise LoaderError(f"{type(error).__name__} was raised {where}. Python would take it for the end.") from error
    error.add_note(f"[penstock] {where}")
    raise error


def _describe(draw: Draw) -> str:
    items = ", ".join(map(str, draw.items[:8].tolist())) + (", …" if len(draw) > 8 else "")
    return f"batch {draw.batch} of epoch {draw.epoch} (items {items})"


def _split_items(block: Block) -> list[Any]:
    if UNNAMED in block:
        return list(block[UNNAMED])
    count = len(next(iter(block.values())))
    return [{name: array[row] for name, array in block.items()} for row in range(count)]


def _n_bytes(block: Block) -> int:
    return sum(array.nbytes for array in block.values())
