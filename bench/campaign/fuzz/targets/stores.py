"""Stored arrays and images: zarr of both versions, `.npy`, HDF5 and NWB files, and OME-NGFF metadata."""

import io
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import zarr

from bench.campaign.fuzz.mutate import BYTES, Mutation
from bench.campaign.fuzz.structures import mutate_json, mutate_npy
from bench.campaign.fuzz.target import Run, SkippedInput, Target, WrongValueError, put_file
from bench.campaign.fuzz.targets.decoders import save_npy
from penstock import ZarrSource
from penstock.core.errors import DamageError, OptionError, ReadError, SourceError
from penstock.source.find_source import open_source
from penstock.source.stored.zarr.codec import Codec
from penstock.source.stored.zarr.store_folder import LocalFolder
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.plates import describe_collection, list_images

sys.path.insert(0, str(Path(__file__).parents[4] / "tests" / "parts"))
from penstock_ome_parts import coordinates, write_ome_image, write_plate

__all__ = ["STORES"]

_OPENING = (SourceError, OptionError, ReadError)
_READING = (SourceError, ReadError)
_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4", "bz2")
_VALUES = np.arange(24, dtype="<i4").reshape(6, 4)


class _Tree:
    """Folders of files that an input replaces one of: STORE/FILE, newline, content.

    Parameters
    ----------
    write
        Writes the stores into an empty folder.
    """

    def __init__(self, write: Callable[[Path], None]) -> None:
        self._write = write

    @cache  # noqa: B019  # there are few trees, which stay
    def files(self) -> Mapping[str, bytes]:
        """Return the content of all files, by path."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self._write(folder)
            found = sorted(path for path in folder.rglob("*") if path.is_file())
            return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    def seeds(self) -> Sequence[bytes]:
        """Return an input for each file, which leaves it as it is."""
        return [name.encode() + b"\n" + content for name, content in self.files().items()]

    def prepare(self, read: Callable[[Path], None]) -> Callable[[Path], Run]:
        """Return what writes the stores, and then reads the store of each input with `read`."""

        def prepare_folder(folder: Path) -> Run:
            for name, content in self.files().items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

            def run(content: bytes) -> None:
                name, newline, stored = content.partition(b"\n")
                path = name.decode(errors="replace")
                if not newline or path not in self.files():
                    raise SkippedInput
                put_file(folder / path, stored)
                try:
                    read(folder / path.partition("/")[0])
                finally:
                    put_file(folder / path, self.files()[path])

            return run

        return prepare_folder


def _write_zarr(folder: Path) -> None:
    for name in _COMPRESSORS:
        compressor = numcodecs.get_codec({"id": name})
        array = zarr.create_array(
            folder / f"v2-{name}", data=_VALUES, chunks=(3, 4), compressors=compressor, zarr_format=2
        )
        array.attrs["a"] = 1
    options: dict[str, dict[str, Any]] = {
        "plain": {"compressors": None, "fill_value": 7},
        "zstd": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
        "blosc": {"compressors": zarr.codecs.BloscCodec()},
        "crc": {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()]},
        "shard": {"shards": (6, 4), "compressors": zarr.codecs.ZstdCodec()},
        "big": {"serializer": zarr.codecs.BytesCodec(endian="big"), "compressors": None},
        "transposed": {"filters": zarr.codecs.TransposeCodec(order=(1, 0))},
    }
    for name, chosen in options.items():
        zarr.create_array(folder / f"v3-{name}", data=_VALUES, chunks=(3, 4), zarr_format=3, **chosen)
    zarr.create_array(folder / "v2-plain", data=_VALUES.astype(">f8"), chunks=(2, 2), compressors=None, zarr_format=2)


def _read_zarr(store: Path) -> None:
    """Read the first and the last row, and compare them with what zarr-python reads."""
    source = ZarrSource(store, threads=1)
    if not len(source.index):
        return
    rows = np.array([0, len(source.index) - 1])
    found = source.take(rows)["data"]
    if found.nbytes > 1 << 20:
        return
    try:
        array = zarr.open_array(store, mode="r")
        expected = np.stack([array[int(row)] for row in rows])
    except Exception:  # it refuses some metadata that can be understood
        return
    same = expected.shape == found.shape and expected.astype(found.dtype).tobytes() == found.tobytes()
    if not same:
        raise WrongValueError(f"not the rows that zarr-python reads: {expected.dtype} {expected.shape}")


def _prepare_codec(_: Path) -> Run:
    """Decode a chunk; the first two bytes of an input choose the compressor and the expected size."""

    def run(content: bytes) -> None:
        if len(content) < 2:
            raise SkippedInput
        name, size = _COMPRESSORS[content[0] % len(_COMPRESSORS)], content[1] * 4
        codec = Codec(np.dtype("<i4"), name)
        body = codec.check_body(memoryview(content[2:]), size)
        out = np.full(size, 0xAB, np.uint8)
        codec.decode(body, out)
        try:
            expected = bytes(numcodecs.get_codec({"id": name}).decode(content[2:]))
        except Exception:  # its limits are others
            return
        if expected != out.tobytes():
            raise WrongValueError(f"not the bytes that numcodecs decodes with {name}")

    return run


def _chunks() -> Sequence[bytes]:
    found = []
    for number, name in enumerate(_COMPRESSORS):
        for values in (np.arange(24, dtype="<i4"), np.zeros(200, "<i4")):
            stored = bytes(numcodecs.get_codec({"id": name}).encode(values))
            found.append(bytes([number, values.nbytes // 4]) + stored)
    return found


def _prepare_npy(folder: Path) -> Run:
    path = folder / "x.npy"

    def run(content: bytes) -> None:
        put_file(path, content)
        open_source(path)
        source = ZarrSource(path, threads=1)
        if not len(source.index):
            return
        rows = np.array([0, len(source.index) - 1])
        found = source.take(rows)["data"]
        try:
            expected = np.load(io.BytesIO(content), allow_pickle=False)[rows]
        except Exception:  # it refuses some headers that can be understood
            return
        if expected.astype(found.dtype).tobytes() != found.tobytes():
            raise WrongValueError("not the rows that numpy reads")

    return run


def _hdf5_files() -> Sequence[bytes]:
    found = []
    for options in ({}, {"chunks": (2, 4)}, {"chunks": (3, 4), "compression": "gzip", "fletcher32": True}):
        out = io.BytesIO()
        with h5py.File(out, "w") as file:
            file.create_dataset("data", data=_VALUES, **options)
            file["group/other"] = np.arange(6.0)
        found.append(out.getvalue())
    return found


def _prepare_hdf5(folder: Path) -> Run:
    path = folder / "x.h5"

    def run(content: bytes) -> None:
        put_file(path, content)
        source = ZarrSource(path, {"x": "data"}, threads=1)
        try:
            if len(source.index):
                source.take(np.array([0, len(source.index) - 1]))
        finally:
            source.close()

    return run


@cache
def _nwb_files() -> Sequence[bytes]:
    from penstock_nwb_parts import add_units, electrodes, new_file, save_nwb  # imports pandas

    nwb = new_file()
    electrodes(nwb, ["CA1", "CA1"])
    add_units(nwb, [[0.1, 0.5, 0.9], [0.2, 0.4]])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.nwb"
        save_nwb(nwb, path)
        return [path.read_bytes()]


def _prepare_nwb(folder: Path) -> Run:
    from penstock.convert.nwb.input import NWBInput

    path = folder / "x.nwb"

    def run(content: bytes) -> None:
        put_file(path, content)
        recording = NWBInput(path).open()
        try:
            if recording.n_samples:
                next(iter(recording.samples(np.array([0]))))
        finally:
            recording.close()

    return run


def _write_images(folder: Path) -> None:
    for version in ("0.1", "0.2", "0.3", "0.4", "0.5"):
        axes = "tczyx" if version < "0.3" else "cyx"
        shape = (1, 1, 2, 4, 4) if version < "0.3" else (1, 4, 4)
        write_ome_image(folder / f"image-{version}", coordinates(*shape), axes, version=version)
    for version in ("0.4", "0.5"):
        write_plate(folder / f"plate-{version}", wells=("A/1",), fields=1, version=version)


def _read_image(image: Path) -> None:
    list_images(image)
    describe_collection(LocalFolder(image))
    found = Multiscale.opened(image)
    found.level_for(dict.fromkeys(found.space, 1.0))
    repr(found)
    for channel in found.channels({}):
        level = channel.levels[0]
        if len(level.shape) != len(channel.axes) or len(level.scale) != len(channel.axes):
            raise WrongValueError(f"scale {level.scale} of an array of shape {level.shape}")


_ZARR, _IMAGES = _Tree(_write_zarr), _Tree(_write_images)


def _mutate_file(content: bytes, rng: random.Random) -> bytes:
    """Change JSON as JSON, and other files as bytes."""
    name, newline, rest = content.partition(b"\n")
    is_json = name.endswith((b"json", b"zarray", b"zattrs", b"zgroup"))
    return name + newline + (mutate_json if is_json else rng.choice(BYTES))(rest, rng)


_ZARR_TOKENS = (b'"compressor": null', b'"sharding_indexed"', b'"blosc"', b'"fill_value": "NaN"', b'"<f8"', b'"r16"')
_FILE: tuple[Mutation, ...] = (_mutate_file, _mutate_file)

STORES = (
    Target("zarr", _ZARR.prepare(_read_zarr), _ZARR.seeds, (DamageError, *_OPENING), _FILE, _ZARR_TOKENS, weight=0.5),
    Target("zarr-codec", _prepare_codec, _chunks, (ValueError,), weight=2),
    Target(
        "npy-file", _prepare_npy, lambda: [save_npy(_VALUES), save_npy(_VALUES.astype(">f8"))], _READING, (mutate_npy,)
    ),
    Target("hdf5", _prepare_hdf5, _hdf5_files, _READING, weight=0.4),
    Target("nwb", _prepare_nwb, _nwb_files, _READING, weight=0.01, is_heavy=True),
    Target("ngff", _IMAGES.prepare(_read_image), _IMAGES.seeds, _OPENING, _FILE, (b'"axes"', b'"scale"'), weight=0.5),
)
