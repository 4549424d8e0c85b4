"""How others read and write the samples that shards are measured with.

Each as its documentation says, with what it has for shuffling; readers of arrays (SPDL, grain, torchdata) get a memory
map of each field. Of small samples, where others take minutes for an epoch, they read fewer.
"""

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from bench.delivery import BATCH, epoch_rate
from bench.measure import Contender, alone
from bench.peers import has_peer
from bench.shard_data import Shapes, samples, warm, write_rate
from bench.sizes import sized

__all__ = [
    "open_litdata",
    "open_mosaic",
    "open_spdl",
    "open_webdataset",
    "readers",
    "store_arrays",
    "store_litdata",
    "store_mds",
    "streaming_package",
    "writers",
]

_MOST_BYTES_SMALL, _MOST_SMALL = 1 << 16, sized(5_000, 2_000)  # of small items, an epoch takes others minutes


def readers(folder: Path, shards: Path, shapes: Shapes, n_items: int) -> list[Contender]:
    """Return those that are installed, with their data written."""
    if sum(4 * int(np.prod(shape)) for shape in shapes.values()) < _MOST_BYTES_SMALL:
        n_items = min(n_items, _MOST_SMALL)
    found = [Contender("webdataset", webdataset, (shards,), "webdataset")]
    peers: list[tuple[str, str, Callable[..., None], Callable[..., float]]] = [
        ("litdata", "litdata", store_litdata, litdata),
        ("streaming", "MosaicML streaming", store_mds, mosaic),
        ("spdl", "SPDL, memory map", store_arrays, spdl),
        ("grain", "grain, memory map", store_arrays, grain),
        ("torchdata", "torchdata.nodes, memory map", store_arrays, torchdata),
    ]
    for module, title, write, read in peers:
        if has_peer(module):
            stored = folder / f"{write.__name__[6:]}-{shards.name}"
            if not stored.exists():
                alone(write, stored, shapes, n_items, peer=module)
            found.append(Contender(title, read, (stored,), module))
    return found


def writers(target: Path, shapes: Shapes, n_items: int, shard_size: int) -> list[Contender]:
    """Return all, to the point where what they wrote lasts."""
    peers: list[tuple[str, str, Callable[..., float], tuple[Any, ...]]] = [
        ("webdataset", "webdataset ShardWriter", write_webdataset, (target, shapes, n_items, shard_size)),
        ("litdata", "litdata", write_litdata, (target, shapes, n_items)),
        ("streaming", "MosaicML streaming", write_mds, (target, shapes, n_items)),
        ("array_record", "ArrayRecord", write_array_record, (target, shapes, n_items, shard_size)),
        ("datasets", "Hugging Face datasets", write_huggingface, (target, shapes, n_items)),
    ]
    return [
        Contender(f"{title}, then fsync", write, (*arguments, True), module)
        for module, title, write, arguments in peers
    ]


# -- reading -----------------------------------------------------------------------------------------------------------


def webdataset(folder: Path) -> float:
    """Iterate the webdataset library over the same shards, with a shuffle buffer of 1000."""
    warm(folder)
    return epoch_rate(open_webdataset(folder))


def open_webdataset(folder: Path, workers: int = 0) -> Iterable[Any]:
    """Return the batches of the webdataset library."""
    import webdataset as wds

    urls = sorted(str(path) for path in folder.glob("*.tar"))[: 5 if "small" in folder.name else None]
    data = (
        wds.WebDataset(urls, shardshuffle=len(urls), seed=1)
        .shuffle(1000)
        .decode()
        .map(_without_suffix)
        .batched(BATCH, collation_fn=torch.utils.data.default_collate, partial=False)
    )
    if workers == 0:
        return data  # type: ignore[no-any-return]  # webdataset has no types
    return DataLoader(data, batch_size=None, num_workers=workers)


def _without_suffix(sample: dict[str, Any]) -> dict[str, Any]:
    return {name.removesuffix(".npy"): value for name, value in sample.items() if name.endswith(".npy")}


def litdata(folder: Path) -> float:
    """Iterate litdata over the same items; the second of two epochs counts."""
    warm(folder)
    loader = open_litdata(folder)
    for _ in loader:
        pass
    return epoch_rate(loader)


def open_litdata(folder: Path, workers: int = 0) -> Iterable[Any]:
    """Return a loader of litdata."""
    import litdata as ld

    data = ld.StreamingDataset(str(folder), shuffle=True, drop_last=True, seed=1)
    return ld.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)  # type: ignore[no-any-return]


def mosaic(folder: Path) -> float:
    """Iterate MosaicML streaming over the same items; the second of two epochs counts."""
    warm(folder)
    loader = open_mosaic(folder)
    for _ in loader:
        pass
    return epoch_rate(loader)


def open_mosaic(folder: Path, workers: int = 0) -> Iterable[Any]:
    """Return torch's DataLoader over a dataset of MosaicML streaming."""
    data = streaming_package().StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    return DataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True)


class _Rows:
    """Samples out of arrays."""

    def __init__(self, folder: Path) -> None:
        self.arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: array[number] for name, array in self.arrays.items()}

    def batch(self, numbers: Any) -> dict[str, torch.Tensor]:
        """Return samples as tensors."""
        found = [self[number] for number in numbers]
        return {name: torch.from_numpy(np.stack([sample[name] for sample in found])) for name in self.arrays}


def spdl(folder: Path) -> float:
    """Run a SPDL pipeline with two threads over shuffled batches of a memory map; the second of two epochs counts."""
    warm(folder)
    rows, rate = _Rows(folder), 0.0
    for epoch in range(2):
        rate = epoch_rate(_spdl_batches(rows, 2, epoch))
    return rate


def open_spdl(folder: Path, workers: int = 0) -> Iterable[Any]:
    """Return the batches of a SPDL pipeline over a memory map; it has one thread at least."""
    return _spdl_batches(_Rows(folder), max(1, workers), epoch=0)


def _spdl_batches(rows: "_Rows", threads: int, epoch: int) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    order = np.random.default_rng(epoch).permutation(len(rows))
    pipeline = (
        PipelineBuilder()
        .add_source(order[start : start + BATCH] for start in range(0, len(rows) - BATCH + 1, BATCH))
        .pipe(rows.batch, concurrency=threads, output_order="input")
        .add_sink(2)
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        yield from pipeline


def torchdata(folder: Path) -> float:
    """Run nodes of torchdata with two threads over batches of a memory map; the second of two epochs counts."""
    from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

    warm(folder)
    rows = _Rows(folder)
    sampler = BatchSampler(RandomSampler(range(len(rows))), BATCH, drop_last=True)
    loader = Loader(ParallelMapper(SamplerWrapper(sampler), map_fn=rows.batch, num_workers=2, method="thread"))
    for _ in loader:
        pass
    return epoch_rate(loader)


def grain(folder: Path) -> float:
    """Iterate a grain dataset over a memory map, with its default threads; the second of two epochs counts."""
    import grain as gr

    warm(folder)
    data = gr.MapDataset.source(_Rows(folder)).shuffle(seed=1).batch(BATCH, drop_remainder=True)
    for _ in data.to_iter_dataset():
        pass
    return epoch_rate(
        {name: torch.from_numpy(array) for name, array in batch.items()} for batch in data.to_iter_dataset()
    )


def store_arrays(folder: Path, shapes: Shapes, n_items: int) -> None:
    """Store samples in one array for each field."""
    folder.mkdir(parents=True)
    arrays = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (n_items, *shape))
        for name, shape in shapes.items()
    }
    for number, sample in enumerate(samples(shapes, n_items)):
        for name, value in sample.items():
            arrays[name][number] = value


# -- writing -----------------------------------------------------------------------------------------------------------


def write_webdataset(folder: Path, shapes: Shapes, n_items: int, shard_size: int, lasting: bool) -> float:
    """Write the same samples with the webdataset library."""
    import webdataset as wds

    def write(count: int) -> None:
        folder.mkdir(parents=True)
        with wds.ShardWriter(str(folder / "%06d.tar"), maxcount=shard_size, verbose=0) as sink:
            for number, sample in enumerate(samples(shapes, count)):
                sink.write({"__key__": f"{number:09d}", **{f"{name}.npy": array for name, array in sample.items()}})

    return write_rate(folder, n_items, write, lasting=lasting)


def write_litdata(folder: Path, shapes: Shapes, n_items: int, lasting: bool) -> float:
    """Write the same samples with litdata."""
    return write_rate(folder, n_items, lambda count: store_litdata(folder, shapes, count), lasting=lasting)


def store_litdata(folder: Path, shapes: Shapes, n_items: int) -> None:
    """Store samples with litdata."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, sample in enumerate(samples(shapes, n_items)):
        writer[number] = {name: torch.from_numpy(np.array(array)) for name, array in sample.items()}
    writer.done()
    writer.merge(1)


def write_mds(folder: Path, shapes: Shapes, n_items: int, lasting: bool) -> float:
    """Write the same samples with MosaicML streaming."""
    return write_rate(folder, n_items, lambda count: store_mds(folder, shapes, count), lasting=lasting)


def store_mds(folder: Path, shapes: Shapes, n_items: int) -> None:
    """Store samples with MosaicML streaming."""
    columns = {
        name: f"ndarray:float32:{','.join(map(str, shape))}" if shape else "float32" for name, shape in shapes.items()
    }
    with streaming_package().MDSWriter(out=str(folder), columns=columns) as sink:
        for sample in samples(shapes, n_items):
            sink.write({name: array if array.ndim else np.float32(array) for name, array in sample.items()})


def streaming_package() -> Any:
    """Return MosaicML's package, with names in place of what it imports for images and texts and we do not use."""
    for path, name in (
        ("torchvision.datasets", "VisionDataset"),
        ("torchvision.transforms.functional", "to_tensor"),
        ("transformers.models.auto.tokenization_auto", "AutoTokenizer"),
        ("transformers.feature_extraction_utils", "BatchFeature"),
        ("transformers.tokenization_utils_base", "BatchEncoding"),
    ):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            sys.modules.setdefault(module, types.ModuleType(module))
        setattr(sys.modules[path], name, type(name, (), {}))
    import streaming

    return streaming


def write_huggingface(folder: Path, shapes: Shapes, n_items: int, lasting: bool) -> float:
    """Write the same samples into one Arrow file with Hugging Face datasets."""
    from datasets import Array2D, Features, Value
    from datasets.arrow_writer import ArrowWriter

    kinds = {name: Array2D(shape, "float32") if len(shape) == 2 else Value("float32") for name, shape in shapes.items()}

    def write(count: int) -> None:
        folder.mkdir(parents=True)
        with ArrowWriter(features=Features(kinds), path=str(folder / "all.arrow")) as sink:
            for sample in samples(shapes, count):
                sink.write(sample)
            sink.finalize()

    return write_rate(folder, n_items, write, lasting=lasting)


def write_array_record(folder: Path, shapes: Shapes, n_items: int, shard_size: int, lasting: bool) -> float:
    """Write the same bytes with ArrayRecord."""
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(count: int) -> None:
        folder.mkdir(parents=True)
        sink: Any = None
        for number, sample in enumerate(samples(shapes, count)):
            if number % shard_size == 0:
                if sink is not None:
                    sink.close()
                sink = ArrayRecordWriter(str(folder / f"{number}.array_record"), "group_size:1")
            sink.write(b"".join(array.tobytes() for array in sample.values()))
        sink.close()

    return write_rate(folder, n_items, write, lasting=lasting)
