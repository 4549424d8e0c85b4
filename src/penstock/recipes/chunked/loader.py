"""Walk a dataset in chunks of a fixed number of batches, validate after each, and resume anywhere.

A chunk here is a segment of a plan, not a storage chunk. For training, it is the next `chunk_size` batches of an
endless stream of passes, each in its own order; for validation, the next part of one pass, in storage order. One number
says which chunk comes next.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.core.index import Index
from penstock.feed.position import Position
from penstock.feed.ranks import current_world
from penstock.feed.torch_loader import TorchOptions, refuse_keywords
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Tail
from penstock.plan.orders import Sequential, Shuffle
from penstock.plan.plan import Plan, Segments
from penstock.plan.world import World

__all__ = ["ChunkedDataLoader", "ChunkedSampler"]

_LOG = logging.getLogger("penstock")
_INSTEAD = dict.fromkeys(("sampler", "batch_sampler"), "Chunks determine the order: leave out one of the two.")


class ChunkedSampler(Sampler[int]):
    """A torch sampler that yields the items of one chunk. Sizes are in items.

    Parameters
    ----------
    dataset_size
        Items of the dataset.
    chunk_size
        Items of a chunk, over all ranks; rounded up to whole batches.
    seed
        Seed of the order.
    shuffle
        Every pass in its own order; False: in storage order, each pass cut exactly, its last chunk shorter.
    batch_size
        Items that stay together: the unit dealt to ranks and counted by a state.
    world
        Which rank this is; None: from `torch.distributed`, or else from the environment.
    identity
        Distinguishes this dataset from others of the same size; a state of another dataset is refused.

    Examples
    --------
    >>> sampler = ChunkedSampler(dataset_size=10, chunk_size=4, seed=1)
    >>> seen = [list(sampler.get_chunk_indices(chunk)) for chunk in range(5)]
    >>> sorted(sum(seen, [])) == sorted([*range(10)] * 2)  # two passes in five chunks
    True
    """

    def __init__(
        self,
        dataset_size: int,
        chunk_size: int,
        seed: int = 42,
        *,
        shuffle: bool = True,
        batch_size: int = 1,
        world: World | None = None,
        identity: str = "",
    ) -> None:
        self.dataset_size = check_integer("dataset_size", dataset_size, at_least=0)
        self.chunk_size = check_integer("chunk_size", chunk_size, at_least=1)
        self.seed = seed
        check_integer("batch_size", batch_size, at_least=1)
        order = Shuffle() if shuffle else Sequential()
        # Training is an endless stream of full batches. Validation sees each item once per pass: its last batch may be
        # short.
        tail: Tail = "drop" if shuffle else "short"
        plan = Plan(Index.uniform(dataset_size, identity=identity), order, batch_size, seed, tail=tail)
        # Chunks are whole batches: they hold more items than requested if batch_size does not divide chunk_size.
        self.segments = Segments(plan, -(-chunk_size // batch_size))
        self.position = Position(self.segments, world or current_world())
        """The chunk, and how many of its batches are done. Iterating the sampler counts nothing; its loader does."""
        self._check_shares()

    @property
    def world(self) -> World:
        """Which rank this is."""
        return self.position.world

    @property
    def current_chunk(self) -> int:
        """The next chunk; counted over all passes."""
        return self.position.epoch

    @property
    def total_chunks(self) -> int:
        """Chunks that cover the dataset once."""
        return self.segments.locate(0).per_pass if self.dataset_size else 0

    def get_chunk_indices(self, chunk_idx: int) -> list[int]:
        """Return the items of a chunk, in order, over all ranks."""
        epoch = self.segments.epoch(check_integer("chunk_idx", chunk_idx, at_least=0))
        return [item for items in epoch.items(range(epoch.n_batches)) for item in items.tolist()]

    def set_chunk(self, chunk_idx: int) -> None:
        """Yield this chunk next."""
        self.position.go_to(Cursor(check_integer("chunk_idx", chunk_idx, at_least=0)))

    def set_epoch(self, epoch: int) -> None:
        """Yield the chunk of this epoch next; called by trainers such as Lightning's, whose epochs are chunks.

        A state loaded in the middle of a chunk is kept.
        """
        self.position.follow(epoch)

    def advance_chunk(self) -> None:
        """Move on to the next chunk."""
        self.set_chunk(self.current_chunk + 1)

    def get_chunk_info(self) -> dict[str, int]:
        """Return the position of the sampler; passes, and chunks within a pass, are counted from 0."""
        place = self.segments.locate(self.current_chunk)
        return {
            "current_chunk": self.current_chunk,
            "total_chunks": self.total_chunks,
            "chunk_size": self.chunk_size,
            "dataset_size": self.dataset_size,
            "samples_in_current_chunk": len(self),
            "pass": place.of_pass,
            "chunk_of_pass": place.number,
        }

    def __iter__(self) -> Iterator[int]:
        for items in self.position.share().items():
            yield from items.tolist()

    def __len__(self) -> int:
        """Items left in this chunk, on this rank."""
        share = self.position.share()
        if not share.n_steps:
            return 0
        last = share.draw(share.n_steps - 1)
        return (share.n_steps - 1) * self.segments.passes.batch_size + len(last.items)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler, as plain JSON."""
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; raise ResumeError if it belongs to other data, sizes or seed."""
        self.position.load_state_dict(state)

    def _check_shares(self) -> None:
        """Raise PlanError if the ranks cannot share a chunk; warn if they leave batches out."""
        last = 0 if self.segments.tail == "drop" else self.total_chunks - 1
        for chunk in {0, max(0, last)}:
            left_out = self.segments.epoch(chunk).share(self.world).left_out
            if left_out:
                _LOG.warning(
                    "%s of %s batches of each chunk are left out, because %s ranks cannot share them equally. "
                    "Use a chunk_size that is divisible by the number of ranks.",
                    left_out, self.segments.segment, self.world.size,
                )  # fmt: skip


class _CountedSampler(ChunkedSampler):
    """The sampler of a loader, which counts the batches that it delivers."""

    is_open = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_open:
            raise LoaderError(
                "Only a ChunkedDataLoader can iterate its sampler, because it counts batches: others would repeat a "
                "chunk, and save no position. With Accelerate, call prepare_loader(accelerator, loader) in place of "
                "accelerator.prepare(loader); with Lightning, pass PenstockDataModule(train=loader)."
            )
        return super().__iter__()


class ChunkedDataLoader(DataLoader[Any]):
    """A torch DataLoader whose epochs are chunks of `chunk_size` batches; a plain DataLoader without a chunk size.

    Iterating yields the current chunk; after its last batch, the next chunk is current. An iteration that stops early
    keeps the current chunk and counts the batches it delivered; one that delivers nothing changes nothing. Under a
    trainer that names its epochs, such as Lightning's, an epoch is a chunk.

    Parameters
    ----------
    dataset
        A map-style dataset; if it has an `identity`, like an audio dataset, states of other datasets are refused.
    batch_size
        Items per batch.
    chunk_size
        Batches per chunk, over all ranks; None: no chunks, and all arguments have torch's meaning.
    shuffle
        With chunks, True by default: an endless stream of passes, each in its own order, for training. False: storage
        order, each pass cut exactly, for validation.
    seed
        Seed of the order, with chunks; None: the initial seed of `generator`, or 42.
    drop_last
        With `shuffle=False`: leave out a short last batch. A shuffled stream has none.
    world
        With chunks: which rank this is; None: from `torch.distributed`, or else from the environment.
    dataloader_kwargs
        Other arguments of torch's DataLoader: `collate_fn`, `pin_memory`, `timeout`, `worker_init_fn`,
        `multiprocessing_context`, `generator`, `prefetch_factor`, `persistent_workers` (True keeps workers alive
        between chunks). With chunks, `sampler` and `batch_sampler` are refused.

    Examples
    --------
    >>> loader = ChunkedDataLoader(list(range(10)), batch_size=2, chunk_size=3, seed=1)
    >>> [len(list(loader)) for _ in range(3)], loader.current_chunk
    ([3, 3, 3], 3)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        chunk_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        self.chunked: _CountedSampler | None = None
        if chunk_size is None:
            super().__init__(dataset, batch_size, shuffle=shuffle, drop_last=drop_last, **dataloader_kwargs)
            return
        check_integer("chunk_size", chunk_size, at_least=1)
        check_integer("batch_size", batch_size, at_least=1)
        refuse_keywords(dataloader_kwargs, _INSTEAD, "with a chunk_size")
        keywords = TorchOptions(generator=dataloader_kwargs.get("generator"), shuffle=shuffle, drop_last=drop_last)
        items = len(dataset)
        shuffled = True if shuffle is None else shuffle
        if drop_last and not shuffled:
            items -= items % batch_size
        sampler = _CountedSampler(
            items,
            chunk_size * batch_size,
            keywords.seed(seed, otherwise=42),
            shuffle=shuffled,
            batch_size=batch_size,
            world=world,
            identity=str(getattr(dataset, "identity", "")),
        )
        torchs = {name: value for name, value in dataloader_kwargs.items() if name not in _INSTEAD}
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=False, **torchs)
        self.chunked = sampler

    @property
    def chunk_size(self) -> int | None:
        """Batches per chunk; None without chunks."""
        return None if self.chunked is None else self.chunked.segments.segment

    @property
    def is_chunked(self) -> bool:
        """Whether there are chunks."""
        return self.chunked is not None

    use_chunked = is_chunked  # both names are in use

    @property
    def current_chunk(self) -> int:
        """The current chunk; counted over all passes. 0 without chunks."""
        return 0 if self.chunked is None else self.chunked.current_chunk

    @property
    def total_chunks(self) -> int:
        """Chunks that cover the dataset once; 1 without chunks."""
        return 1 if self.chunked is None else self.chunked.total_chunks

    @property
    def remaining(self) -> int:
        """Batches left in the current chunk, on this rank; all batches without chunks."""
        return super().__len__() if self.chunked is None else self.position.remaining

    @property
    def position(self) -> Position:
        """The chunk, and how many of its batches were delivered."""
        return self._sampler().position

    @property
    def device(self) -> torch.device:
        """The device of the batches: main memory. A training moves them on."""
        return torch.device("cpu")

    @property
    def world(self) -> World:
        """The rank that the batches are dealt to."""
        return self._sampler().world

    def set_chunk(self, chunk_idx: int) -> None:
        """Yield this chunk next."""
        self._sampler().set_chunk(chunk_idx)

    def get_chunk_info(self) -> dict[str, int]:
        """Return the position of the loader; passes, and chunks within a pass, are counted from 0."""
        return self._sampler().get_chunk_info()

    def __iter__(self) -> Any:
        return super().__iter__() if self.chunked is None else self._iterate()

    def _iterate(self) -> Iterator[Any]:
        """Yield and count batches; after the last one, the next chunk is current."""
        sampler = self._sampler()
        self.position.leave_finished()
        delivery, sampler.is_open = self.position.begin(), True
        try:
            for batch in super().__iter__():
                delivery.count()
                yield batch
                del batch  # the next one may reuse its memory, which is in the CPU cache
        finally:
            sampler.is_open = False
        delivery.finish()

    def __len__(self) -> int:
        """Batches in the current chunk, on this rank."""
        return super().__len__() if self.chunked is None else len(self.position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader after the delivered batches, as plain JSON."""
        return self._sampler().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, also in the middle of a chunk."""
        self._sampler().load_state_dict(state)

    def end_workers(self) -> None:
        """End persistent workers; the next chunk starts new ones."""
        iterator, self._iterator = self._iterator, None
        end: Callable[[], None] | None = getattr(iterator, "_shutdown_workers", None)
        if end is not None:  # others may refer to the iterator: Lightning does, after an error in a hook
            end()

    def _sampler(self) -> _CountedSampler:
        if self.chunked is None:
            raise OptionError("chunk_size must be an integer >= 1 to use chunks, got None. Make the loader with one.")
        return self.chunked
