"""Make a batch from a draw: read its items, transform them, collate them. Shared by all executors."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import LoaderError
from penstock.core.metadata.records import Records
from penstock.core.protocols import Source, Transform
from penstock.core.seeds import generator_for
from penstock.core.types import UNNAMED, Block, Draw, Part, Span, Window
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
    collate_group: Callable[[Block, Sequence[int], Sequence[_Mask]], list[Any]] | None
    """Makes batches from a whole block, given the items and the mask of each; None: items are collated one by one."""

    collate_items: Callable[[list[Any], Draw], Any]
    """Makes a batch from a list of items, and the draw that they come from."""

    windows_held: int
    allocate: Callable[[int], NDArray[np.uint8]] | None = None
    pages: Pages = field(default_factory=Pages)
    """What is read ahead of the batches, and given back after them."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pool", "_windows")}

    def make_batches(self, draws: Sequence[Draw], record: Record, lend: Lend | None = None) -> Iterator[Any]:
        """Yield the batch of each draw, up to the first Failure; of small draws, many are made at a time.

        Parameters
        ----------
        lend
            Lends the memory of blocks that no code of the user gets to see; None: reusable memory of this process.
        """
        if lend is None or self.collate_group is None:
            lend = self._lend_block
        batches = self._make_group(draws, record, lend)
        if batches is not None:
            batches.reverse()
            while batches:  # a batch that was delivered is not kept here
                yield batches.pop()
            return
        for draw in draws:
            try:
                batch = self._collate(self._read(draw, record, lend), draw, record)
            except BaseException as error:  # SystemExit in the user's code, too: it must not vanish in a worker
                yield Failure(error)
                return
            yield batch
            del batch

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

    def _make_group(self, draws: Sequence[Draw], record: Record, lend: Lend) -> list[Any] | None:
        """Read draws together, and return their batches; None if they are to be made one by one.

        That is so if one of them fails, too: those before it are delivered, and the error names it.
        """
        if len(draws) < 2 or self.collate_group is None or any([_is_whole_window(draw) for draw in draws]):  # noqa: C419  # faster
            return None
        began = time.perf_counter()
        try:
            block = self._read_group(draws, lend)
            read = time.perf_counter()
            record("read", read - began, _n_bytes(block))
            batches = self.collate_group(block, [len(draw.items) for draw in draws], [draw.mask for draw in draws])
        except Exception:
            return None
        except BaseException as error:
            return [Failure(_name(error, f"while reading {_describe(draws[0])}, and the {len(draws) - 1} after it"))]
        record("collate", time.perf_counter() - read, 0)
        return batches

    def _read_group(self, draws: Sequence[Draw], lend: Lend) -> Block:
        """Read the items of draws, one after the other."""
        if draws[0].parts:
            return self._read_parts(_join_parts(draws), sum(map(len, draws)), lend)
        items = np.concatenate([draw.items for draw in draws])
        block = self._read_items(items, lend)
        self.pages.give_back(self.source, items, draws[0].epoch)
        return block

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
        if _is_whole_window(draw):
            return self._read_draw(draw, lend)  # nothing to keep for another draw
        return self._read_parts(draw.parts, len(draw), lend)

    def _read_parts(self, parts: Sequence[Part], n_items: int, lend: Lend) -> Block:
        """Return rows of windows, each at its place."""
        lent = lend(n_items) or {}
        fields = self.source.fields.items()
        block = {name: lent[name] if name in lent else field.blank(n_items) for name, field in fields}
        for part in parts:
            window = self._windows.get(part.window)
            for name, column in block.items():
                place = slice(part.at, part.at + len(part.rows))
                if isinstance(column, Records):
                    column[place] = window[name][part.rows]
                else:
                    window[name].take(part.rows, axis=0, out=column[place], mode="clip")
        # Metadata that are kept must not keep those of the window.
        return block | {name: column.compact() for name, column in block.items() if isinstance(column, Records)}

    def _collate(self, block: Block, draw: Draw, record: Record) -> Any:
        items = [] if self.collate_group is not None else _split_items(block)
        began = time.perf_counter()
        if self.transform is not None:
            items = [self._apply_transform(item, draw, row) for row, item in enumerate(items)]
            record("transform", time.perf_counter() - began, 0)
            began = time.perf_counter()
        try:
            collate = self.collate_group
            batch = self.collate_items(items, draw) if collate is None else collate(block, [len(draw)], [draw.mask])[0]
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


def _is_whole_window(draw: Draw) -> bool:
    """Return whether a draw is all items of one window, in the order in which they are stored."""
    if len(draw.parts) != 1:
        return False
    part = draw.parts[0]
    return len(part.rows) == len(part.window) and bool((np.diff(part.rows) == 1).all())


def _join_parts(draws: Sequence[Draw]) -> list[Part]:
    """Return the parts of draws, one after the other; those of the same window that follow each other as one."""
    found: list[tuple[Window, int, list[NDArray[np.int64]]]] = []
    first = 0
    for draw in draws:
        for part in draw.parts:
            if found and found[-1][0] is part.window:
                found[-1][2].append(part.rows)
            else:
                found.append((part.window, first + part.at, [part.rows]))
        first += len(draw)
    return [Part(window, at, np.concatenate(rows)) for window, at, rows in found]


def _raise_named(error: BaseException, where: str) -> NoReturn:
    """Raise the error of a user's code with a note that says where; one that would end a loop, as LoaderError."""
    named = _name(error, where)
    raise named from named.__cause__


def _name(error: BaseException, where: str) -> BaseException:
    if isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
        named = LoaderError(f"{type(error).__name__} was raised {where}. Python would take it for the end.")
        named.__cause__ = error
        return named
    error.add_note(f"[penstock] {where}")
    return error


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
