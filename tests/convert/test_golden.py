"""Golden bytes: the shards of a conversion of every kind of input.

Readers may be exchanged under a conversion; what it writes stays, byte for byte. Digests are of the tar files, which
hold the fields and metadata of all items. Changing a value here is a breaking change: shards of a conversion that was
begun would not fit those that it has written.
"""

import hashlib
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, save_nwb, series

import penstock as ps
from penstock.convert import ConvertOptions, NWBOptions, ReadOptions, Split
from penstock.shard import WriteOptions

FEW = WriteOptions(3)


def numbered(*shape: int, dtype: Any = np.float32) -> Any:
    """Return an array whose values are their own position, counted from 1."""
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)


def write_npy(folder: Path) -> dict[str, Any]:
    np.save(folder / "rows.npy", numbered(7, 2, dtype=np.int16))
    return {"inputs": folder / "rows.npy"}


def write_windows(folder: Path) -> dict[str, Any]:
    return {**write_npy(folder), "reading": ReadOptions(sequence_length=2, overlap=0.5)}


def write_npz(folder: Path) -> dict[str, Any]:
    for number, name in enumerate("abc"):
        rows = numbered(9, 2)[3 * number : 3 * number + 3]
        np.savez(folder / f"session_{name}.npz", x=rows, number=rows[:, 0].astype(np.int32))
    split = ConvertOptions(FEW, Split((("train", 0.5), ("val", 0.5)), seed=3))
    return {"inputs": str(folder / "*.npz"), "options": split}


def write_zarr(folder: Path) -> dict[str, Any]:
    group = zarr.open_group(folder / "group.zarr", mode="w")
    for name, values in (("a", numbered(5, 3)), ("b", numbered(5, dtype=np.int64))):
        group.create_array(name, data=values, chunks=(2, *values.shape[1:]))
    return {"inputs": folder / "group.zarr"}


def write_columns(folder: Path) -> dict[str, Any]:
    return {**write_zarr(folder), "options": ConvertOptions(WriteOptions(3, layout="columns"))}


def write_auto(folder: Path) -> dict[str, Any]:
    return {**write_shards(folder), "options": ConvertOptions(WriteOptions(3, layout="auto"))}


def write_wav(folder: Path, name: str, frames: int, channels: int = 2) -> None:
    with wave.open(str(folder / name), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(1000)
        file.writeframes((numbered(frames, channels) * 64).astype("<i2").tobytes())


def write_audio(folder: Path) -> dict[str, Any]:
    for name, frames in (("one.wav", 130), ("two.wav", 90)):
        write_wav(folder, name, frames)
    return {"inputs": str(folder / "*.wav"), "reading": ReadOptions(window_seconds=0.03)}


def write_clips(folder: Path) -> dict[str, Any]:
    for name, frames in (("anna_1.wav", 13), ("bert_1.wav", 9)):
        write_wav(folder, name, frames, 1)
    return {"inputs": str(folder / "*.wav"), "reading": ReadOptions(clips=True, clip_seconds=0.01)}


def write_pictures(folder: Path) -> dict[str, Any]:
    for number, label in enumerate(("cat", "cat", "dog", "dog")):
        (folder / label).mkdir(exist_ok=True)
        pixels = numbered(2, 3, dtype=np.uint8) + number
        (folder / label / f"{number}.pgm").write_bytes(b"P5 3 2 255\n" + pixels.tobytes())
    return {"inputs": str(folder / "*" / "*.pgm"), "format": "files"}


def write_shards(folder: Path) -> dict[str, Any]:
    about = [{"trial": number} for number in range(1, 6)]
    arrays = {"x": numbered(5, 3), "trace": [numbered(1 + number, dtype=np.int32) for number in range(5)]}
    ps.create_shards_from_arrays(folder / "shards", arrays, 2, about, show_progress=False)
    return {"inputs": folder / "shards"}


def yield_samples(path: Path) -> Iterator[Any]:
    for number in range(1, 6):
        yield {"value": np.array([number], np.float32), "text": f"no. {number}"}, {"from": path.stem}


def write_own(folder: Path) -> dict[str, Any]:
    (folder / "own.dat").write_bytes(b"1")
    return {"inputs": folder / "own.dat", "format": yield_samples}


def write_recordings(folder: Path, options: NWBOptions) -> dict[str, Any]:
    for number, name in enumerate(("a", "b")):
        nwb = new_file(identifier=name, session_id=name)
        add_units(nwb, [np.arange(0.005, 4, 0.1 + 0.05 * unit) + number / 50 for unit in range(3)])
        add_lfp(nwb, numbered(400, 2), rate=100.0)
        add_behavior(nwb, series("speed", numbered(80), timestamps=np.arange(80) / 20))
        for trial in range(3):
            nwb.add_trial(start_time=0.5 + trial, stop_time=0.9 + trial)
        save_nwb(nwb, folder / f"{name}.nwb")
    return {"inputs": str(folder / "*.nwb"), "reading": ReadOptions(nwb=options)}


def write_nwb(folder: Path) -> dict[str, Any]:
    return write_recordings(folder, NWBOptions(("spikes", "lfp", "behavior")))


def write_trials(folder: Path) -> dict[str, Any]:
    fields = {"start": "intervals/trials/start_time"}
    return write_recordings(folder, NWBOptions(("spikes",), align="trials", pre_ms=100, post_ms=300, fields=fields))


GOLDEN = {
    "audio": {
        "shard_000000.tar": "20c070d079d0f7fc",
        "shard_000001.tar": "f6b5d80dea026ebe",
        "shard_000002.tar": "8dccddc1588527cb",
    },
    "auto": {"shard_000000.tar": "9cccda9a2d9c6349", "shard_000001.tar": "a781ab9b9d5dd279"},
    "clips": {"shard_000000.tar": "45c51a4cf39214b5"},
    "columns": {"shard_000000.tar": "7a8cce785b880bba", "shard_000001.tar": "24d1876ce69b6f14"},
    "npy": {
        "shard_000000.tar": "79fb0f9b1caf3e4d",
        "shard_000001.tar": "a714ef8caa15f920",
        "shard_000002.tar": "6d14c47cf1abd78c",
    },
    "npz": {
        "train/shard_000000.tar": "fe2a5ec1c90f75d5",
        "val/shard_000000.tar": "86ebbd0a2ed544c7",
        "val/shard_000001.tar": "032e132ea4666202",
    },
    "nwb": {
        "shard_000000.tar": "aaf8f080fb0af8f3",
        "shard_000001.tar": "9c4ddc5acd2befdd",
        "shard_000002.tar": "8e228d6460336710",
        "shard_000003.tar": "efc938a64045d995",
        "shard_000004.tar": "dd0c4288c2f5b6b5",
    },
    "own": {"shard_000000.tar": "ff775c63a1487cb7", "shard_000001.tar": "0c6f23e6cad47e9e"},
    "pictures": {"shard_000000.tar": "2f119bceb1bafb7c", "shard_000001.tar": "dd1d2852c5ae59c7"},
    "shards": {"shard_000000.tar": "32697822dd954f87", "shard_000001.tar": "732e51f9eb80079c"},
    "trials": {"shard_000000.tar": "1fd89b46e69ae32f", "shard_000001.tar": "bac08f05a40a3502"},
    "windows": {"shard_000000.tar": "ceb4e0d8756201c8", "shard_000001.tar": "cc05250d711da8fe"},
    "zarr": {"shard_000000.tar": "5d784fe8e01a723f", "shard_000001.tar": "a27316dccf6727d0"},
}


@pytest.mark.parametrize("write", [globals()[f"write_{kind}"] for kind in GOLDEN], ids=list(GOLDEN))
def test_the_shards_of_a_conversion_are_what_they_were(write: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    arguments = {"options": ConvertOptions(FEW), **write(given)}
    ps.convert_to_shards(arguments.pop("inputs"), tmp_path / "out", **arguments, show_progress=False)
    found = {
        str(path.relative_to(tmp_path / "out")): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in sorted((tmp_path / "out").rglob("*.tar"))
    }
    assert found == GOLDEN[write.__name__.removeprefix("write_")]
