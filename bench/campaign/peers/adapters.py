"""Each library as its documentation says: a writer, a reader, a loader, its state.

Checksums are on where a library has them.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaign.peers.adapter import SHARD, Adapter, N, TorchLoader, keep, sample

__all__ = ["ADAPTERS"]


class Webdataset(Adapter):
    package = "webdataset"

    def import_package(self) -> None:
        import webdataset  # noqa: F401

    def write(self, folder: Path, numbers: Any, make: Callable[[int], Any] = sample, **options: Any) -> None:
        import webdataset as wds

        folder.mkdir(exist_ok=True)
        suffix, shard = options.get("suffix", "x.npy"), options.get("shard", SHARD)
        limit = {"maxsize": options["limit"]} if "limit" in options else {}
        with wds.ShardWriter(str(folder / "shard-%06d.tar"), maxcount=shard, verbose=0, **limit) as writer:
            for number in numbers:
                writer.write({"__key__": f"{number:06d}", suffix: make(number)})

    def shards(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.tar"))

    def loader(self, folder: Path, **options: Any) -> Any:
        import webdataset as wds

        urls = options.get("urls") or [str(path) for path in self.shards(folder)]
        shuffle, transform = options.get("shuffle", False), options.get("transform", keep)
        dataset = wds.WebDataset(
            urls,
            shardshuffle=len(urls) if shuffle else False,
            nodesplitter=wds.split_by_node,
            empty_check=False,
            seed=options.get("seed", 1),
        )
        if shuffle:
            dataset = dataset.shuffle(100, seed=options.get("seed", 1))
        dataset = dataset.decode().to_tuple(options.get("suffix", "x.npy")).map_tuple(transform)
        workers, timeout = options.get("workers", 0), options.get("timeout", 0)
        loader = wds.WebLoader(
            dataset.batched(options.get("batch_size", 2), collation_fn=first_of_each),
            batch_size=None,
            collate_fn=keep,
            num_workers=workers,
            timeout=timeout if workers else 0,
            multiprocessing_context=options.get("method") if workers else None,
        )
        return TorchLoader(loader)


def first_of_each(samples: list[tuple[Any, ...]]) -> list[Any]:
    return [one[0] for one in samples]


class Litdata(Adapter):
    package = "litdata"
    note = "no checksums"
    header = 4 + 4 * (SHARD + 1)

    def import_package(self) -> None:
        import litdata.processing.data_processor  # noqa: F401

    def write(self, folder: Path, numbers: Any, make: Callable[[int], Any] = sample, **options: Any) -> None:
        import litdata

        limit = {"chunk_bytes": options["limit"]} if "limit" in options else {"chunk_size": options.get("shard", SHARD)}
        others = {name: options[name] for name in ("compression", "use_checkpoint") if name in options}
        litdata.optimize(
            make, list(numbers), str(folder), num_workers=1, verbose=False, start_method="fork", **limit, **others
        )

    def shards(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.bin"))

    def manifest(self, folder: Path) -> Path:
        return folder / "index.json"

    def loader(self, folder: Path, **options: Any) -> Any:
        import litdata

        dataset = litdata.StreamingDataset(
            str(folder),
            shuffle=options.get("shuffle", False),
            seed=options.get("seed", 1),
            drop_last=options.get("drop_last", False),
            transform=options.get("transform"),
        )
        workers = options.get("workers", 0)
        others = {"multiprocessing_context": options.get("method"), "timeout": options.get("timeout", 0)}
        loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=options.get("batch_size", 2),
            num_workers=workers,
            collate_fn=list,
            drop_last=options.get("drop_last", False),
            **(others if workers else {}),
        )
        return TorchLoader(loader)

    def state(self, loader: Any) -> Any:
        return pickle.loads(pickle.dumps(loader.loader.state_dict()))

    def load(self, loader: Any, state: Any) -> None:
        loader.loader.load_state_dict(state)


def import_streaming() -> Any:
    """Import the package, and with it torchvision, which is built for CUDA: declare the operators that it misses."""
    import torch

    with suppress(RuntimeError):  # they are there
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import streaming

    return streaming


class Streaming(Adapter):
    package = "mosaicml-streaming"
    note = "validate_hash='xxh64'; errors of its threads are logged, not raised"
    header = 4 + 4 * (SHARD + 1)

    def import_package(self) -> None:
        import_streaming()

    def write(self, folder: Path, numbers: Any, make: Callable[[int], Any] = sample, **options: Any) -> None:
        columns = {"x": options.get("column", "ndarray")}
        with import_streaming().MDSWriter(
            out=str(folder),
            columns=columns,
            hashes=["xxh64"],
            size_limit=options.get("limit", 200 + 75 * options.get("shard", SHARD)),
            compression=options.get("compression"),
        ) as writer:
            for number in numbers:
                writer.write({"x": make(number)})

    def shards(self, folder: Path) -> list[Path]:
        return sorted(path for path in folder.iterdir() if ".mds" in path.name)

    def manifest(self, folder: Path) -> Path:
        return folder / "index.json"

    def loader(self, folder: Path, **options: Any) -> Any:
        streaming = import_streaming()
        if "WORLD_SIZE" not in os.environ:
            streaming.base.util.clean_stale_shared_memory()
        cache = folder.parent / f"cache_{os.environ.get('WORLD_SIZE', '1')}_{len(list(folder.parent.iterdir()))}"
        transform = options.get("transform", keep)

        class Transformed(streaming.StreamingDataset):
            def __getitem__(self, at: Any) -> Any:
                return transform(super().__getitem__(at)["x"])

        dataset = Transformed(
            remote=str(folder),
            local=options.get("cache", str(cache)),
            shuffle=options.get("shuffle", False),
            shuffle_seed=options.get("seed", 1),
            batch_size=options.get("batch_size", 2),
            validate_hash="xxh64",
            download_timeout=10,
        )
        workers = options.get("workers", 0)
        others = {"multiprocessing_context": options.get("method"), "timeout": options.get("timeout", 0)}
        loader = streaming.StreamingDataLoader(
            dataset,
            batch_size=options.get("batch_size", 2),
            num_workers=workers,
            drop_last=options.get("drop_last", False),
            **(others if workers else {}),
        )
        return TorchLoader(loader)

    def state(self, loader: Any) -> Any:
        return loader.loader.state_dict()

    def load(self, loader: Any, state: Any) -> None:
        loader.loader.load_state_dict(state)


class Samples:
    """A map-style dataset, as a user of torchdata writes it."""

    def __init__(self, count: int, transform: Callable[[Any], Any] = keep) -> None:
        self.count, self.transform = count, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self.count:
            raise IndexError(number)
        return self.transform(sample(number))


class Torchdata(Adapter):
    package = "torchdata"
    note = "StatefulDataLoader over a map-style dataset"

    def import_package(self) -> None:
        import torchdata.stateful_dataloader  # noqa: F401

    def loader(self, folder: Path, **options: Any) -> Any:
        import torch
        from torch.utils.data import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        dataset: Any = Samples(options.get("count", N), options.get("transform", keep))
        shuffle, workers = options.get("shuffle", False), options.get("workers", 0)
        sampler = DistributedSampler(dataset, shuffle=shuffle) if "WORLD_SIZE" in os.environ else None
        generator = torch.Generator().manual_seed(options.get("seed", 1))
        others = {"multiprocessing_context": options.get("method"), "timeout": options.get("timeout", 0)}
        loader = StatefulDataLoader(
            dataset,
            batch_size=options.get("batch_size", 2),
            shuffle=shuffle if sampler is None else None,
            sampler=sampler,
            num_workers=workers,
            collate_fn=list,
            drop_last=options.get("drop_last", False),
            generator=generator,
            **(others if workers else {}),
        )
        return TorchLoader(loader)

    def state(self, loader: Any) -> Any:
        return pickle.loads(pickle.dumps(loader.loader.state_dict()))

    def load(self, loader: Any, state: Any) -> None:
        loader.loader.load_state_dict(state)


class GrainLoader:
    """Batches of a grain iterator; a state that was loaded is where the next iteration begins."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.iterator = loader, None
        self.saved: Any = None

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        self.iterator = iter(self.loader)
        if self.saved is not None:
            self.iterator.set_state(self.saved)
        for batch in self.iterator:
            yield list(np.asarray(batch))


class Grain(Adapter):
    package = "grain"
    note = "ArrayRecord, whose chunks have checksums"

    def import_package(self) -> None:
        import array_record.python.array_record_module  # noqa: F401
        import grain.python  # noqa: F401

    def write(self, folder: Path, numbers: Any, make: Callable[[int], Any] = sample, **options: Any) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        folder.mkdir(exist_ok=True)
        numbers, shard = list(numbers), options.get("shard", SHARD)
        for first in range(0, len(numbers), shard):
            writer = ArrayRecordWriter(str(folder / f"shard-{first // shard:06d}.array_record"), "group_size:1")
            for number in numbers[first : first + shard]:
                writer.write(np.asarray(make(number)).tobytes())
            writer.close()

    def shards(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.array_record"))

    def loader(self, folder: Path, **options: Any) -> Any:
        import grain.python as pygrain

        source = pygrain.ArrayRecordDataSource(options.get("urls") or [str(path) for path in self.shards(folder)])
        sharding = pygrain.NoSharding()
        if "WORLD_SIZE" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            sharding = pygrain.ShardOptions(rank, size, drop_remainder=options.get("drop_last", False))
        sampler = pygrain.IndexSampler(
            len(source),
            shard_options=sharding,
            shuffle=options.get("shuffle", False),
            seed=options.get("seed", 1),
            num_epochs=1,
        )
        drop = options.get("drop_last", False)
        operations = [Decode(options.get("transform", keep)), pygrain.Batch(options.get("batch_size", 2), drop)]
        if "random" in options:
            operations.insert(1, options["random"])
        loader = pygrain.DataLoader(
            data_source=source, sampler=sampler, operations=operations, worker_count=options.get("workers", 0)
        )
        return GrainLoader(loader)

    def state(self, loader: Any) -> Any:
        if loader.iterator is None:
            return iter(loader.loader).get_state()
        return loader.iterator.get_state()

    def load(self, loader: Any, state: Any) -> None:
        loader.saved = state


def _decode_class() -> type:
    try:
        from grain.python import MapTransform
    except ImportError:
        return object

    class Decode(MapTransform):
        def __init__(self, transform: Callable[[Any], Any]) -> None:
            self.transform = transform

        def map(self, record: bytes) -> Any:
            return self.transform(np.frombuffer(record, np.int64))

    Decode.__qualname__ = "Decode"
    return Decode


Decode: Any = _decode_class()
ADAPTERS: dict[str, Adapter] = {
    "webdataset": Webdataset(),
    "litdata": Litdata(),
    "streaming": Streaming(),
    "torchdata": Torchdata(),
    "grain": Grain(),
}
