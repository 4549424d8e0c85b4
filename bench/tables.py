"""Tables into tensors, shuffled, batch 32: mapped Feather against ArraySource, Parquet against its peers.

The peers of Parquet are pyarrow's own row groups, permuted and cut into batches, as many at a time as a shuffle window
has; Hugging Face `datasets` over the same rows (an Arrow file in its cache) with torch's DataLoader; and the same as a
stream of the Parquet file with a shuffle buffer of as many rows.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from bench.measure import Contender, measured, report
from bench.sizes import sized

__all__ = ["run"]

BATCH, WINDOW, GROUP_ROWS = 32, 8, 1000
SIZES = {"1 kB": (256, sized(200_000, 16_000)), "40 kB": (10_000, sized(5_000, 1_000))}
"""Values of an item, and items."""


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for name, (n_values, n_items) in SIZES.items():
        data = write(folder / f"tables {name}", n_values, n_items)
        results = measured(
            [
                Contender("ArraySource, memory map", array_rate, (data, 0)),
                Contender("TableSource, Feather", feather_rate, (data, 0)),
                Contender("ArraySource, 2 threads", array_rate, (data, 2)),
                Contender("TableSource, 2 threads", feather_rate, (data, 2)),
            ],
            repeats,
        )
        report(out, f"tables feather {name}", results)
    data = write(folder / "tables 1 kB", *SIZES["1 kB"])
    results = measured(
        [
            Contender("TableSource, WindowShuffle", parquet_rate, (data, 0)),
            Contender("TableSource, 2 threads", parquet_rate, (data, 2, "threads")),
            Contender("TableSource, 2 processes", parquet_rate, (data, 2)),
            Contender("pyarrow, row groups permuted", pyarrow_rate, (data,)),
            Contender("datasets, shuffled", datasets_rate, (data,)),
            Contender("datasets, stream and buffer", stream_rate, (data,)),
        ],
        repeats,
    )
    report(out, "tables parquet", results)


def write(folder: Path, n_values: int, n_items: int) -> Path:
    """Write the same items as arrays, as Feather without compression, and as Parquet."""
    if (folder / "rows.parquet").exists():
        return folder
    import pyarrow as pa
    from pyarrow import feather, parquet

    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).normal(size=(n_items, n_values)).astype(np.float32)
    labels = np.arange(n_items)
    np.save(folder / "x.npy", values)
    np.save(folder / "label.npy", labels)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values.reshape(-1), n_values), "label": labels})
    feather.write_feather(table, str(folder / "rows.feather"), compression="uncompressed", chunksize=10_000)
    parquet.write_table(table, folder / "rows.parquet", row_group_size=GROUP_ROWS)
    return folder


def rate(batches: Iterable[Any]) -> float:
    """Return the items per second of batches with a label each."""
    began = time.perf_counter()
    count = sum(len(batch["label"]) for batch in batches)
    return count / (time.perf_counter() - began)


def loader_rate(source: Any, order: ps.Order, workers: int, executor: str) -> float:
    """Return the rate of the second epoch: files are mapped, and processes started."""
    plan = ps.Plan(source.index, order, batch_size=BATCH)
    options = ps.RunOptions(executor=executor, persistent=True) if workers else ps.RunOptions()  # type: ignore[arg-type]
    with ps.Loader(source, plan, num_workers=workers, options=options) as loader:
        rate(loader)
        return rate(loader)


def array_rate(data: Path, workers: int) -> float:
    """Read a memory map of each field."""
    arrays = {name: np.load(data / f"{name}.npy", mmap_mode="r") for name in ("x", "label")}
    return loader_rate(ps.ArraySource(arrays), ps.Shuffle(), workers, "threads")


def feather_rate(data: Path, workers: int) -> float:
    """Read a mapped Feather file."""
    return loader_rate(ps.TableSource(data / "rows.feather"), ps.Shuffle(), workers, "threads")


def parquet_rate(data: Path, workers: int, executor: str = "processes") -> float:
    """Read Parquet in shuffle windows."""
    return loader_rate(ps.TableSource(data / "rows.parquet"), ps.WindowShuffle(WINDOW), workers, executor)


def pyarrow_rate(data: Path) -> float:
    """Read row groups in random order, some at a time, and permute them."""
    from pyarrow import parquet

    file, rng = parquet.ParquetFile(data / "rows.parquet"), np.random.default_rng(0)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        groups = rng.permutation(file.metadata.num_row_groups)
        for first in range(0, len(groups), WINDOW):
            table = file.read_row_groups(groups[first : first + WINDOW].tolist())
            table = table.take(rng.permutation(len(table))).combine_chunks()
            for batch in table.to_batches(BATCH):
                x, label = batch.column("x").flatten().to_numpy(), batch.column("label").to_numpy()
                yield {"x": torch.tensor(x.reshape(len(label), -1)), "label": torch.tensor(label)}

    rate(batches())
    return rate(batches())


def datasets_rate(data: Path) -> float:
    """Read an Arrow file in the cache of `datasets`, with torch's DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_parquet(str(data / "rows.parquet"), cache_dir=str(data / "cache"))
    loader = torch.utils.data.DataLoader(whole.with_format("torch"), batch_size=BATCH, shuffle=True)
    rate(_first(loader, 100))
    return rate(_first(loader, 1000))


def stream_rate(data: Path) -> float:
    """Stream the Parquet file with a shuffle buffer, with torch's DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    files = {"train": str(data / "rows.parquet")}
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=WINDOW * GROUP_ROWS).with_format("torch")
    return rate(_first(torch.utils.data.DataLoader(stream, batch_size=BATCH), 200))


def _first(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield the first batches: an epoch of some peers takes minutes."""
    for _, batch in zip(range(count), batches, strict=False):
        yield batch
