"""Every member that the webdataset library decodes is decoded to the same value, from tars that it wrote."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from penstock_source_suite import same
from penstock_webdataset_library import consumed, read_by_the_library, tars
from PIL import Image

from penstock import TarSource, create_webdataset_dataloader
from penstock.convert.to_shards import convert_to_shards
from penstock.core.errors import DamageError, OptionError, ReadError
from penstock.recipes.webdataset import WebDatasetLoader, WebDatasetWriter
from penstock.shard.decoders.images import IMAGE_MODES
from penstock.shard.index_tars import index_archives
from tests.shard.samples import archive

N, SHARD = 7, 3


def image(i: int, mode: str, kind: str = "PNG") -> bytes:
    values = (np.arange(5 * 4 * 4).reshape(5, 4, 4) * 3 + i).astype(np.uint8)
    if mode == "I;16":
        picture = Image.fromarray(values[..., 0].astype(np.uint16) * 200)
    else:
        picture = Image.fromarray(values if mode == "RGBA" else values[..., :3].copy()).convert(mode)
    stored = io.BytesIO()
    picture.save(stored, kind)
    return stored.getvalue()


def plain(i: int) -> dict[str, Any]:
    return {
        "txt": f"text {i} ä",
        "json": {"n": i, "list": [1, None, "x"]},
        "cls": i,
        "x.npy": np.arange(6.0).reshape(2, 3) + i,
        "x.npy.gz": np.arange(6) + i,
        "note.txt.gz": f"note {i}",
        "json.gz": {"n": -i},
        "mp": {"n": i, "raw": b"\0", "list": [1.5, None]},
        "state.mp.gz": [i, "x"],
        "npz": {"a": np.arange(2) + i, "b": np.float32([i])},
        "pth": {"w": torch.arange(3) + i},
        "pyd": {"n": i},
        "mp4": b"film %d" % i,
    }


def pictures(i: int) -> dict[str, Any]:
    return {
        "png": image(i, "RGB"),
        "gray.PNG": image(i, "L"),
        "alpha.png": image(i, "RGBA"),
        "palette.png": image(i, "P"),
        "deep.png": image(i, "I;16"),
        "bits.png": image(i, "1"),
        "jpg": image(i, "RGB", "JPEG"),
        "print.jpeg": image(i, "CMYK", "JPEG"),
        "gif": image(i, "P", "GIF"),
        "webp": image(i, "RGB", "WEBP"),
        "tif": image(i, "L", "TIFF"),
        "png.gz": image(i, "L"),
    }


def write(folder: Path, make: Any) -> Path:
    """Have the library write shards whose keys begin again in each of them, and index these."""
    for number, start in enumerate(range(0, N, SHARD)):
        with wds.TarWriter(str(folder / f"train-{number:06d}.tar")) as writer:
            for i in range(start, min(N, start + SHARD)):
                writer.write({"__key__": f"sess-{i % 2}/{i - start:04d}", **make(i)})
    manifest, problems = index_archives(folder)
    assert (problems, manifest.n_items) == ([], N)
    return folder


def equal(left: Any, right: Any) -> bool:
    """Compare values with arrays, tensors and images inside them, type by type and bit by bit."""
    if isinstance(right, Image.Image):
        return left.mode == right.mode and left.tobytes() == right.tobytes()
    if isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and same(left.numpy(), right.numpy())
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[name], value) for name, value in right.items())
    if isinstance(right, list) and not isinstance(left, np.ndarray):
        return len(left) == len(right) and all(map(equal, left, right))
    return same(left, right)


def by_suffix(source: TarSource, block: dict[str, Any], row: int) -> dict[str, Any]:
    return {info.suffix.lower(): block[name][row] for name, info in source.manifest.fields.items()}


def test_members_are_decoded_as_the_library_decodes_them(tmp_path: Path) -> None:
    write(tmp_path, plain)
    source, theirs = TarSource(tmp_path), read_by_the_library(tars(tmp_path))
    order = np.array([6, 0, 3, 3, 5, 1, 2, 4])
    block = source.take(order)
    for row, item in enumerate(order.tolist()):
        ours = by_suffix(source, block, row)
        assert ours.keys() == {name for name in theirs[item] if not name.startswith("__")}
        assert [name for name, value in ours.items() if not equal(value, theirs[item][name])] == []
    source.close()


@pytest.mark.parametrize("mode", IMAGE_MODES)
def test_images_are_decoded_in_every_mode_of_the_library(tmp_path: Path, mode: str) -> None:
    write(tmp_path, pictures)
    theirs = read_by_the_library(tars(tmp_path), mode)
    source = TarSource(tmp_path, decode=mode)
    block = source.take(np.arange(N))
    for item in range(N):
        ours = by_suffix(source, block, item)
        assert [name for name, value in ours.items() if not equal(value, theirs[item][name])] == []
    source.close()


def test_images_stay_bytes_as_the_library_leaves_them_unless_asked(tmp_path: Path) -> None:
    write(tmp_path, pictures)
    source = TarSource(tmp_path, decode="basic")
    theirs = read_by_the_library(tars(tmp_path))
    block = source.take(np.arange(N))
    for item in range(N):
        ours = by_suffix(source, block, item)
        assert ours == {name: value for name, value in theirs[item].items() if not name.startswith("__")}
    source.close()


def test_shards_that_are_converted_keep_what_only_files_can_hold(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", lambda i: {**pictures(i), **{name: plain(i)[name] for name in ("txt", "x.npy", "mp")}})
    convert_to_shards(tmp_path / "a", tmp_path / "b", show_progress=False)
    before, after = TarSource(tmp_path / "a", decode=False), TarSource(tmp_path / "b", decode=False)
    assert list(after.fields) == [*before.fields, "metadata"]
    assert [after.manifest.fields[name].suffix.lower() for name in before.fields if name != "png.gz"] == [
        before.manifest.fields[name].suffix.lower() for name in before.fields if name != "png.gz"
    ]
    left, right = before.take(np.arange(N)), after.take(np.arange(N))
    for name in ("png", "palette.png", "jpg", "gif", "mp", "txt"):
        assert left[name].tolist() == right[name].tolist()
    again = TarSource(tmp_path / "b").take(np.array([5]))
    assert again["mp"][0] == plain(5)["mp"]


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_key_of_an_item_is_that_of_the_library(tmp_path: Path) -> None:
    write(tmp_path, lambda i: {"cls": i, "x.npy": np.arange(3) + i})
    keys = [sample["__key__"] for sample in read_by_the_library(tars(tmp_path))]
    assert len(set(keys)) < N  # they begin again in each shard
    source = TarSource(tmp_path)
    assert [source.key_of(item) for item in range(N)] == keys
    assert "__key__" not in source.fields
    with pytest.raises(ReadError, match="Could not read items 7"):
        source.key_of(N)
    with pytest.raises(OptionError, match="item must be an integer >= 0, got -1"):
        source.key_of(-1)
    loader = WebDatasetLoader(tmp_path)
    assert {int(sample["cls"]): sample["__key__"] for sample in loader} == dict(enumerate(keys))
    loader.close()
    source.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_keys_of_their_items(tmp_path: Path, workers: int) -> None:
    write(tmp_path, lambda i: {"cls": i, "x.npy": np.arange(3) + i})
    keys = [sample["__key__"] for sample in read_by_the_library(tars(tmp_path))]
    with create_webdataset_dataloader(tmp_path, batch_size=3, num_workers=workers) as loader:
        for batch in loader:
            assert batch["__key__"] == [keys[item] for item in batch["cls"].tolist()]
            assert batch["x"][:, 0].tolist() == batch["cls"].tolist()


def test_shards_of_penstock_give_keys_on_request(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path, shard_size=2) as writer:
        for number in range(5):
            writer.write_sample({"x": np.arange(3) + number}, sample_id=f"sub-01/run.{number}" if number else None)
    theirs = [
        sample["__key__"]
        for sample in consumed(lambda: wds.WebDataset([*map(str, tars(tmp_path))], shardshuffle=False))
    ]
    source = TarSource(tmp_path, fields=["__key__", "x"])
    block = source.take(np.array([4, 0, 2]))
    assert block["__key__"].tolist() == [theirs[4], theirs[0], theirs[2]] == [source.key_of(item) for item in (4, 0, 2)]
    assert block["x"][:, 0].tolist() == [4, 0, 2]
    assert TarSource(tmp_path, fields=["__key__"]).take(np.array([1]))["__key__"].tolist() == [theirs[1]]
    assert "__key__" not in next(iter(WebDatasetLoader(tmp_path)))
    source.close()


def test_a_name_that_was_changed_is_found(tmp_path: Path) -> None:
    path, members = tmp_path / "a.tar", [("one.cls", b"1"), ("two.cls", b"2")]
    path.write_bytes(archive(members))
    index_archives(tmp_path)
    path.write_bytes(archive([("won.cls", b"1"), *members[1:]]))
    source = TarSource(tmp_path)
    with pytest.raises(DamageError, match=r"item 0 in a\.tar: the key in the name 'won\.cls' does not match"):
        source.key_of(0)
    assert source.key_of(1) == "two"
    source.close()
