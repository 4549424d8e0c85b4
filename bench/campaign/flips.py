"""Every bit of small files is flipped, one at a time: the items are right, or there is a typed error; never silence.

Trial n flips every 32nd byte, from byte n on; after 32 trials every byte has had a flipped bit, after 256 every bit.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from penstock_test_shards import ALL, N_ITEMS, SECOND, facts, flip, write_items
from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec

from bench.campaign.trials import Kind, Trials
from penstock import TarSource
from penstock.core.errors import PenstockError
from penstock.shard.manifest import MANIFEST
from penstock.source.stored.source import ZarrSource

__all__ = ["FLIPS"]

_STEP = 32
_ROWS = np.arange(1, 201, dtype="i4").reshape(50, 4)
_CODECS = {"crc32c": Crc32cCodec(), "gzip": GzipCodec(level=1), "zstd": ZstdCodec(checksum=True)}


def _flip_all(file: Path, number: int, is_right: Callable[[], bool]) -> int:
    """Flip the bits of a trial, one after the other; return how many."""
    assert is_right(), "nothing is damaged"
    places = range(number % _STEP, file.stat().st_size, _STEP)
    for place in places:
        bit = (place // _STEP + number // _STEP) % 8
        flip(file, place, bit)
        with suppress(PenstockError):
            assert is_right(), f"wrong items in silence: bit {bit} of byte {place} of {file.name}"
        flip(file, place, bit)
    assert is_right(), "all is as it was"
    return len(places)


def _shards(name: str, **options: str) -> Callable[[random.Random, Path, int], int]:
    def run(rng: random.Random, folder: Path, number: int) -> int:
        write_items(folder / "set", **options)

        def is_right() -> bool:
            source = TarSource(folder / "set")
            try:
                return facts(source.take(ALL)) == list(range(N_ITEMS))
            finally:
                source.close()

        return _flip_all(folder / "set" / name, number, is_right)

    return run


def _chunks(*codecs: Any) -> Callable[[random.Random, Path, int], int]:
    def run(rng: random.Random, folder: Path, number: int) -> int:
        path = folder / "array"
        options = {"chunks": (25, 4), "compressors": codecs, "zarr_format": 3}
        zarr.create_array(path, shape=_ROWS.shape, dtype=_ROWS.dtype, **options)[...] = _ROWS

        def is_right() -> bool:
            source = ZarrSource(path, threads=1)
            try:
                return bool(source.take(np.arange(50))["data"].tobytes() == _ROWS.tobytes())
            finally:
                source.close()

        return _flip_all(path / "c" / "1" / "0", number, is_right)

    return run


_MOST = 8 * _STEP
FLIPS = Trials(
    "flips",
    [
        Kind("shard", "bit flips in a shard", (13, 14), _shards(SECOND), share=3, most=_MOST),
        Kind("shard-gz", "bit flips in a shard of gz", (13, 14), _shards(SECOND, compression="gz"), most=_MOST),
        Kind("manifest", "bit flips in a manifest", (19,), _shards(MANIFEST), most=_MOST),
        Kind("index", "bit flips in a side index", (13, 14), _shards(f"{SECOND}.index"), most=_MOST),
        *(
            Kind(f"zarr-{name}", f"bit flips in a zarr chunk with {name}", (20,), _chunks(codec), most=_MOST)
            for name, codec in _CODECS.items()
        ),
    ],
)
