"""Stored arrays of every kind, and where the bytes of some of their rows lie; found otherwise than by the sources."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numcodecs
import numpy as np
import zarr
from penstock_hint_checks import Range, check_read_ahead
from zarr.codecs import BloscCodec, Crc32cCodec

from penstock.source.stored.source import ZarrSource

__all__ = ["CHUNK", "ITEMS", "N_ROWS", "ROW_BYTES", "TRUTH", "WHOLE", "WIDTH", "WRITERS", "Store", "chunk_files"]

N_ROWS, WIDTH, CHUNK = 320, 16_384, 4
ROW_BYTES = 4 * WIDTH  # 20 MB in all
ITEMS = np.array([1, 0, 319, 1])
WHOLE = np.array([*range(4), *range(316, 320)])
"""All items of the chunks of `ITEMS`."""

# Not compressible, so that chunks stay far apart, and different in every place.
TRUTH = np.random.default_rng(20).permutation(N_ROWS * WIDTH).astype(np.int32).reshape(N_ROWS, WIDTH)


@dataclass(frozen=True)
class Store:
    """A stored array, and where it should be read for its first two rows and its last one."""

    path: Path
    locate: Callable[[Path], list[Range]]
    name: str = "."
    by_row: bool = False
    """Whether rows have their own bytes."""

    index_bytes: int = 0
    """Of the index at the end of each file."""

    def open(self) -> ZarrSource:
        return ZarrSource(self.path, {"x": self.name})

    @property
    def ranges(self) -> list[Range]:
        return self.locate(self.path)

    def check_read_ahead(self, source: ZarrSource) -> None:
        items = np.array([1, 0, len(source.index) - 1])
        ends = [(path, path.stat().st_size) for path, _, _ in self.ranges]
        indexes = [(path, size - self.index_bytes, size) for path, size in ends if self.index_bytes]
        check_read_ahead(self.path.parent, lambda: source.prepare(items), self.ranges, also=indexes)


def write_npy(folder: Path, n_rows: int = N_ROWS) -> Store:
    np.save(folder / "x.npy", TRUTH[:n_rows])

    def locate(path: Path) -> list[Range]:
        begin = int(np.load(path, mmap_mode="r").offset)
        return [(path, begin + row * ROW_BYTES, begin + (row + 1) * ROW_BYTES) for row in (0, 1, n_rows - 1)]

    return Store(folder / "x.npy", locate, by_row=True)


def chunk_files(names: list[str]) -> Callable[[Path], list[Range]]:
    return lambda path: [(path / name, 0, (path / name).stat().st_size) for name in names]


def write_v2(folder: Path, n_rows: int = N_ROWS) -> Store:
    compressor = numcodecs.Blosc("lz4", shuffle=0)
    zarr.create_array(
        folder / "x",
        data=TRUTH[:n_rows],
        chunks=(CHUNK, WIDTH // 2),
        zarr_format=2,
        compressors=compressor,
        fill_value=-1,
    )
    return Store(folder / "x", chunk_files(["0.0", "0.1", f"{n_rows // CHUNK - 1}.0", f"{n_rows // CHUNK - 1}.1"]))


def write_v3(folder: Path, n_rows: int = N_ROWS) -> Store:
    codec = BloscCodec(cname="lz4")
    zarr.create_array(folder / "x", data=TRUTH[:n_rows], chunks=(CHUNK, WIDTH), compressors=codec, fill_value=-1)
    return Store(folder / "x", chunk_files(["c/0/0", f"c/{n_rows // CHUNK - 1}/0"]))


def write_other_codec(folder: Path) -> Store:
    """Write a store that zarr-python has to read."""
    codec = numcodecs.LZMA(preset=0)
    zarr.create_array(folder / "x", data=TRUTH[:20], chunks=(CHUNK, WIDTH), zarr_format=2, compressors=codec)
    return Store(folder / "x", chunk_files(["0.0", "4.0"]))


def write_plain(folder: Path, n_rows: int = N_ROWS) -> Store:
    """Write a store of large, uncompressed chunks."""
    zarr.create_array(folder / "x", data=TRUTH[:n_rows], chunks=(n_rows, WIDTH), compressors=None, fill_value=-1)
    rows = [(row * ROW_BYTES, (row + 1) * ROW_BYTES) for row in (0, 1, n_rows - 1)]
    return Store(folder / "x", lambda path: [(path / "c/0/0", *row) for row in rows], by_row=True)


def write_shards(folder: Path, n_rows: int = N_ROWS) -> Store:
    zarr.create_array(
        folder / "x",
        data=TRUTH[:n_rows],
        chunks=(CHUNK, WIDTH),
        shards=(n_rows, WIDTH),
        compressors=None,
        fill_value=-1,
    )
    index_bytes = 16 * (n_rows // CHUNK) + 4

    def locate(path: Path) -> list[Range]:
        shard = path / "c/0/0"
        index = np.frombuffer(shard.read_bytes()[-index_bytes:-4], "<u8").reshape(-1, 2)
        rows = [int(index[row // CHUNK, 0]) + row % CHUNK * ROW_BYTES for row in (0, 1, n_rows - 1)]
        return [(shard, begin, begin + ROW_BYTES) for begin in rows]

    return Store(folder / "x", locate, by_row=True, index_bytes=index_bytes)


def write_checked_shards(folder: Path, n_rows: int = N_ROWS) -> Store:
    zarr.create_array(
        folder / "x", data=TRUTH[:n_rows], chunks=(CHUNK, WIDTH), shards=(n_rows // 2, WIDTH), fill_value=-1,
        compressors=(BloscCodec(cname="lz4"), Crc32cCodec()),
    )  # fmt: skip
    index_bytes = 16 * (n_rows // 2 // CHUNK) + 4

    def locate(path: Path) -> list[Range]:
        found = []
        for number, chunk in ((0, 0), (1, n_rows // 2 // CHUNK - 1)):
            shard = path / f"c/{number}/0"
            entry = shard.read_bytes()[-index_bytes:][16 * chunk :]
            begin, size = struct.unpack("<2Q", entry[:16])
            found.append((shard, begin, begin + size))
        return found

    return Store(folder / "x", locate, index_bytes=index_bytes)


WRITERS = (
    write_npy, write_v2, write_v3, write_plain, write_shards, write_checked_shards
)  # fmt: skip
"""Each writes an array of `n_rows` rows into a folder."""
