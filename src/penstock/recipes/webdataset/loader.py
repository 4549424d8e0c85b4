"""WebDataset-compatible loaders over tar shards, shuffled and resumable.

Thin layers over the core: `TarSource` reads, `Plan` orders, `Loader` delivers. None of these classes has a thread, a
random state or a position of its own.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock.core.checks import check_integer, check_keys, option_names
from penstock.core.errors import LoaderError, OptionError, ResumeError, SourceError
from penstock.core.protocols import Observer, Order
from penstock.core.text import cause
from penstock.feed.loader import Loader
from penstock.feed.ranks import current_world
from penstock.feed.torch_loader import TorchOptions, torch_loader
from penstock.files.durable import write_aside
from penstock.files.regular import read_regular
from penstock.plan.cursor import check_count, show_value
from penstock.plan.orders import Sequential, WindowShuffle, shuffle_within
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.recipes.webdataset.collate import collate_samples, collate_webdataset
from penstock.run.options import RunOptions
from penstock.shard.decoders.decode import Decoding
from penstock.shard.manifest import METADATA
from penstock.shard.names import KEY
from penstock.source.tar.source import STRETCH_ITEMS, TarSource

__all__ = ["ResumableWebDatasetLoader", "WebDatasetLoader", "create_webdataset_dataloader"]

_LOG = logging.getLogger("penstock")

_Path = str | os.PathLike[str]

_MOST_WORKERS = 1024


class WebDatasetLoader(IterableDataset[dict[str, Any]]):
    """The samples of a dataset, one epoch per `iter`: `{field: tensor, …, "metadata": dict}`.

    Samples of tars that others wrote have `"__key__"`, as in the webdataset library; those that Penstock wrote have it
    if `fields` says so, and their id in the metadata.

    The order depends on the seed and the epoch. `get_state` counts delivered samples, and `set_state` resumes after
    them. Under torch's DataLoader with worker processes, worker w of n gets the shards w, w + n, …;
    `create_webdataset_dataloader` has the same order for any number of workers.

    Parameters
    ----------
    shard_dir
        The folder of the dataset, or the pattern given to `penstock index`; or the URL of one, `s3://bucket/train`.
    shard_pattern
        Use only the shards whose names match, such as `"shard_00000*.tar"`; None: all shards of the manifest.
    shuffle
        Shuffle, differently in each epoch.
    shuffle_shards
        Also permute the shards; None: same as `shuffle`.
    buffer_size
        The reach of the shuffle: samples are mixed with about this many neighbours. With the size of the dataset or
        more, every order is equally likely. Takes no memory unless shards are compressed.
    max_workers
        Threads that read ahead; None: samples are read when they are needed.
    seed
        Seed of the order.
    decode
        A mode of images, such as `"rgb8"`; True: the colours that are stored; False: the stored bytes of each field.
    world
        Which rank this is; None: from `torch.distributed`, or else from the environment.
    source_options
        Other arguments of `TarSource`: `fields`, `verify`, `on_error`, `max_bad_items`, `quarantine`, `allow_pickle`;
        for a URL `store`, `cache` and `cache_bytes`.
    """

    def __init__(
        self,
        shard_dir: _Path,
        shard_pattern: str | None = None,
        shuffle: bool = True,
        shuffle_shards: bool | None = None,
        buffer_size: int = 1000,
        max_workers: int | None = None,
        seed: int = 42,
        decode: Decoding = True,
        world: World | None = None,
        **source_options: Any,
    ) -> None:
        check_keys("Options", source_options, option_names(type(self), WebDatasetLoader, TarSource))
        self._threads = 0 if max_workers is None else check_integer("max_workers", max_workers, at_least=0)
        self._buffer_size = check_integer("buffer_size", buffer_size, at_least=1)
        self._shuffle, self._shuffle_shards = shuffle, shuffle if shuffle_shards is None else shuffle_shards
        self._seed = seed
        # In the chunks that the order permutes.
        source = TarSource(shard_dir, chunk_items=STRETCH_ITEMS if shuffle else None, decode=decode, **source_options)
        if source_options.get("fields") is None and source.manifest.shard_size is None:  # others wrote the tars
            source = source.with_fields([*source.fields, KEY])
        self.source, shards = source, source.manifest.shards
        self._shards = [n for n, shard in enumerate(shards) if fnmatch(shard.name, shard_pattern or "*")]
        if not self._shards:
            raise SourceError(
                f"No shards found that match {shard_pattern!r}. The dataset has {shards[0].name} … {shards[-1].name}."
            )
        self._world = world or current_world()
        self._loader: Loader | None = None
        # Epochs that each worker process has begun; shared, so that workers that are restarted for each epoch know
        # which one it is.
        self._begun = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Return the number of samples in an epoch, on this rank."""
        return len(self._own_loader())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        if worker is not None and len(self._shards) <= worker.id < _MOST_WORKERS:
            return  # there are fewer shards than workers
        loader = self._own_loader() if worker is None else self._worker_loader(worker.id, worker.num_workers)
        for batch in loader:
            yield {name: value[0] for name, value in batch.items()}

    def get_state(self) -> dict[str, Any]:
        """Return the position of this loader, as small plain JSON.

        `shard_idx` and `sample_offset` are the progress, counted over shards; the other keys are the exact position.
        """
        if self._begun.any():
            raise LoaderError(
                "This loader runs in worker processes of torch's DataLoader, and cannot know what was delivered. Use "
                "create_webdataset_dataloader() and its state_dict(), or num_workers=0."
            )
        state = self._own_loader().state_dict()
        borders = np.cumsum(self._counts(self._shards))
        position = min(state["origin"] + state["batch"], int(borders[-1]))
        shard = int(np.searchsorted(borders[:-1], position, side="right"))
        before = int(borders[shard - 1]) if shard else 0
        return {"shard_idx": shard, "sample_offset": position - before, **state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume from `state` with the next `iter`; older states have just `shard_idx` and `sample_offset`.

        Raises ResumeError if the state belongs to another dataset, seed or order.
        """
        if not isinstance(state, Mapping) or not {"shard_idx", "sample_offset"} <= set(state):
            raise ResumeError(f"state must be what get_state() returned, got {show_value(state)}.")
        loader = self._own_loader()
        if "version" in state:
            loader.load_state_dict(
                {key: value for key, value in state.items() if key not in ("shard_idx", "sample_offset")}
            )
            return
        shard, offset = state["shard_idx"], state["sample_offset"]
        counts = self._counts(self._shards)
        check_count("shard_idx", shard)
        check_count("sample_offset", offset)
        if shard >= len(counts) or offset > counts[shard]:
            raise ResumeError(
                f"shard_idx and sample_offset must lie in shards of {counts} samples, got {shard!r} and {offset!r}."
            )
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": sum(counts[:shard]) + offset, "origin": 0})

    def plan(self, batch_size: int, tail: Literal["drop", "short"] = "short") -> Plan:
        """Return the plan of this loader: its order, in batches."""
        return self._plan(self._shards, batch_size, tail)

    def close(self) -> None:
        """End all threads and close all files."""
        if self._loader is not None:
            self._loader.close()

    def __getstate__(self) -> dict[str, Any]:
        start = self._loader.state_dict() if self._loader is not None else None
        return {**self.__dict__, "_loader": None, "_resumed": start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        resumed = state.pop("_resumed")
        self.__dict__.update(state)
        if resumed is not None:
            self._own_loader().load_state_dict(resumed)

    def _own_loader(self) -> Loader:
        if self._loader is None:
            self._loader = self._make_loader(self._shards, threads=self._threads)
        return self._loader

    def _worker_loader(self, worker: int, n_workers: int) -> Loader:
        if worker >= _MOST_WORKERS:
            raise LoaderError(f"num_workers must be <= {_MOST_WORKERS}, got {n_workers}.")
        start = self._own_loader().state_dict()
        if start["batch"] or start["origin"]:
            raise LoaderError(
                "With worker processes of torch's DataLoader, this loader must be at the start of an epoch, but it is "
                "in the middle of one. Use create_webdataset_dataloader(), or num_workers=0."
            )
        mine = [shard for place, shard in enumerate(self._shards) if place % n_workers == worker]
        loader = self._make_loader(mine, threads=0)
        loader.set_epoch(start["epoch"] + int(self._begun[worker]))
        self._begun[worker] += 1
        return loader

    def _plan(self, shards: Sequence[int], batch_size: int, tail: Literal["drop", "short"]) -> Plan:
        counts, index = self._counts(range(len(self.source.manifest.shards))), self.source.index
        if len(shards) < len(counts):
            index = index.select(np.repeat(np.isin(np.arange(len(counts)), shards), counts))
        compressed = self.source.manifest.compression != "none"
        order: Order = Sequential()
        if self._shuffle:
            order = shuffle_within(index, self._buffer_size, permute_chunks=self._shuffle_shards, held=compressed)
        elif self._shuffle_shards:
            order = WindowShuffle(1, permute_items=False, held=compressed)
        return Plan(index, order, batch_size=batch_size, seed=self._seed, tail=tail)

    def _counts(self, shards: Iterable[int]) -> list[int]:
        return [self.source.manifest.shards[shard].n_items for shard in shards]

    def _make_loader(self, shards: Sequence[int], *, threads: int) -> Loader:
        options = RunOptions(executor="threads" if threads else "auto")
        plan = self._plan(shards, 1, "drop")
        return Loader(self.source, plan, num_workers=threads, world=self._world, options=options)


class ResumableWebDatasetLoader(WebDatasetLoader):
    """A WebDatasetLoader that saves its position to a file, and resumes from that file.

    Parameters
    ----------
    shard_dir
        The folder of the dataset.
    checkpoint_path
        The file; None: nothing is saved. If it exists, the next `iter` resumes from it.
    checkpoint_interval
        Save after this many samples, and at the end of each epoch. Only delivered samples count.
    options
        Arguments of `WebDatasetLoader`.
    """

    def __init__(
        self,
        shard_dir: _Path,
        checkpoint_path: _Path | None = None,
        checkpoint_interval: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(shard_dir, **options)
        self._path = None if checkpoint_path is None else Path(checkpoint_path)
        self._interval = check_integer("checkpoint_interval", checkpoint_interval, at_least=1)
        if self._path is not None and self._path.exists():
            self.load_checkpoint()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._path is not None and get_worker_info() is not None:
            raise LoaderError(
                f"Worker processes of torch's DataLoader cannot save {self._path}: they do not know what was "
                "delivered. Use create_webdataset_dataloader() and its state_dict(), max_workers= for threads, or "
                "num_workers=0."
            )
        for count, sample in enumerate(super().__iter__(), start=1):
            if self._path is not None and count % self._interval == 0:
                self.save_checkpoint()
            yield sample
        if self._path is not None and get_worker_info() is None:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Save the position of the loader, atomically."""
        if self._path is None:
            raise OptionError("checkpoint_path must be set to save a checkpoint, got None. Or keep get_state().")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(self._path, json.dumps(self.get_state()).encode())

    def load_checkpoint(self) -> None:
        """Resume from the file."""
        if self._path is None:
            raise OptionError("checkpoint_path must be set to load a checkpoint, got None. Or use set_state().")
        try:
            state = json.loads(read_regular(self._path))
        except (OSError, ValueError, RecursionError) as error:
            raise ResumeError(
                f"Could not read the checkpoint {self._path}: {cause(error)}. Remove it to start from the beginning."
            ) from error
        try:
            self.set_state(state)
        except ResumeError as error:
            error.add_note(f"[penstock] in the checkpoint {self._path}; remove it to start from the beginning")
            raise
        _LOG.info(
            "Resuming from %s: epoch %s, sample %s.", self._path, self._own_loader().epoch, state["sample_offset"]
        )


def create_webdataset_dataloader(
    shard_dir: _Path,
    batch_size: int = 32,
    num_workers: int = 4,
    shuffle: bool = True,
    buffer_size: int = 1000,
    prefetch_factor: int = 2,
    pin_memory: bool = True,
    *,
    drop_last: bool = False,
    pad_value: float | None = None,
    device: str | torch.device | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Loader:
    """Return a loader of batches `{field: tensor, …, "metadata": list of dicts}`, in an order that no workers change.

    With `state_dict()` and `load_state_dict()`, resume anywhere, with any number of workers and ranks.

    Parameters
    ----------
    shard_dir, shuffle, buffer_size
        As for `WebDatasetLoader`.
    batch_size, drop_last
        Samples per batch; leave out a last batch that is not full.
    num_workers, prefetch_factor, pin_memory
        Threads or processes that prepare batches, whichever is faster here; batches that each prepares ahead; whether
        these are in page-locked memory, if there is a CUDA device.
    pad_value, device, observer
        Value to pad fields of varying length with, and a mask is added (None: they are lists); device of the batches
        (None: main memory); receiver of timings, such as `Timings()`.
    options
        As in torch's DataLoader: `collate_fn` (called with a list of samples of `WebDatasetLoader`), `timeout`,
        `persistent_workers` (True by default), `generator` (its initial seed is the seed of the order),
        `worker_init_fn` and `multiprocessing_context` (both: workers are processes). And other arguments of
        `WebDatasetLoader`: `seed`, `shard_pattern`, `decode`, `world`, `fields`, `verify`, `store`, `cache`, ….

    Examples
    --------
    >>> import tempfile
    >>> from penstock import create_shards_from_arrays
    >>> folder = tempfile.mkdtemp()
    >>> _ = create_shards_from_arrays(folder, {"x": np.arange(6.0)}, shard_size=4)
    >>> with create_webdataset_dataloader(folder, batch_size=3, num_workers=0, shuffle=False) as loader:
    ...     [batch["x"].tolist() for batch in loader]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    options |= {"prefetch_factor": prefetch_factor, "drop_last": drop_last, "pin_memory": pin_memory}
    if "max_workers" in options:
        raise OptionError("max_workers is an option of WebDatasetLoader only. Use num_workers here.")
    keywords, given = TorchOptions.split(options, create_webdataset_dataloader, WebDatasetLoader, TarSource)
    given["seed"] = keywords.seed(given.get("seed"), otherwise=42)
    dataset = WebDatasetLoader(shard_dir, shuffle=shuffle, buffer_size=buffer_size, **given)
    plan, collate = dataset.plan(batch_size), _choose_collate(dataset.source, pad_value, keywords.collate_fn)
    return torch_loader(
        dataset.source, batch_size, replace(keywords, collate_fn=collate), order=plan.order, index=plan.index,
        seed=plan.seed, num_workers=num_workers, device=device, observer=observer, world=given.get("world"),
    )  # fmt: skip


def _choose_collate(
    source: TarSource, pad_value: float | None, given: Callable[[list[Any]], Any] | None
) -> Callable[[list[Any]], Any] | None:
    """Return the given collate function, or one if some fields have no fixed shape; None if blocks suffice."""
    if given is not None:
        if pad_value is not None:
            raise OptionError(f"pad_value must be None with a collate_fn, which pads itself, got {pad_value!r}.")
        return partial(collate_samples, collate=given)
    infos = source.manifest.fields
    loose = [name for name, field in source.fields.items() if field.item_bytes is None and name not in (METADATA, KEY)]
    ragged = {name for name in loose if infos[name].dtype is not None or infos[name].suffix.endswith("npy")}
    return partial(collate_webdataset, ragged=ragged, pad_value=pad_value) if loose else None
