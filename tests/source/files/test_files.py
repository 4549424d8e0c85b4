"""FilesSource: rows of a table, with what the files hold that it names."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import soundfile
from penstock_source_suite import Case, ShortSuite
from PIL import Image

from penstock import (
    ArraySource,
    FilesSource,
    Loader,
    OptionError,
    Plan,
    ReadError,
    RunOptions,
    Shuffle,
    SourceError,
    TarSource,
)
from penstock.recipes.webdataset import WebDatasetWriter

N = 9


def pixels(number: int) -> np.ndarray:
    """Return an image whose size and colours tell its number."""
    return np.full((4 + number % 3, 5, 3), number, np.uint8) + np.arange(3, dtype=np.uint8)


def write_images(folder: Path, offset: int = 0) -> Path:
    """Write images, and a table with their captions; return the table."""
    folder.mkdir()
    for item in range(N):
        Image.fromarray(pixels(item + offset)).save(folder / f"{item}.png")
    lines = [f"{item}.png,image {item + offset},{item * 10}" for item in range(N)]
    (folder / "captions.csv").write_text("\n".join(["path,caption,score", *lines]) + "\n")
    return folder / "captions.csv"


class TestImagesWithCaptions(ShortSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        def make(offset: int) -> FilesSource:
            folder = tmp_path / str(offset)
            return FilesSource(folder / "captions.csv" if folder.exists() else write_images(folder, offset))

        def truth(item: int) -> dict[str, Any]:
            row = {"path": f"{item}.png", "caption": f"image {item}", "score": np.int64(10 * item)}
            return {**row, "image": pixels(item)}

        return Case(partial(make, 0), truth, N, partial(make, 1))


class TestArraysOfOneShape(ShortSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        def make(offset: int) -> FilesSource:
            names = [f"{offset} {item}.npy" for item in range(N)]
            for item, name in enumerate(names):
                np.save(tmp_path / name, np.array([[item, offset]], ">f4"))
            table = ArraySource({"path": np.array(names), "x": np.arange(N)})
            return FilesSource(table, decode="npy", root=tmp_path, shape=(1, 2), chunk_items=4)

        def truth(item: int) -> dict[str, Any]:
            return {"path": np.str_(f"0 {item}.npy"), "x": np.int64(item), "array": np.array([[item, 0]], np.float32)}

        return Case(partial(make, 0), truth, N, partial(make, 1))


def test_a_dict_of_columns_is_a_table_as_in_open(tmp_path: Path) -> None:
    write_images(tmp_path / "photos")
    columns = {"file": [f"{item}.png" for item in range(N)], "score": [10 * item for item in range(N)]}
    source = FilesSource(columns, "file", root=tmp_path / "photos")
    found = source.take(np.array([7, 2]))
    assert found["file"].tolist() == ["7.png", "2.png"]
    assert found["score"].tolist() == [70, 20]
    for image, item in zip(found["image"], (7, 2), strict=True):
        np.testing.assert_array_equal(image, pixels(item))
    with pytest.raises(OptionError, match=r"column must be one of 'file', 'score', got 'path'"):
        FilesSource(columns)
    with pytest.raises(SourceError, match="split"):
        FilesSource(datasets.DatasetDict(train=datasets.Dataset.from_dict(columns)), "file")


def read_first_byte(path: str) -> int:
    with Path(path).open("rb") as file:
        return file.read(1)[0]


def make_files(folder: Path) -> dict[str, tuple[str, Any]]:
    """Write one file for each decoder; return its name and what it holds."""
    sound = np.linspace(-0.5, 0.5, 80, dtype=np.float32).reshape(40, 2)
    soundfile.write(folder / "a.wav", sound, 16_000, subtype="FLOAT")
    deep = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    Image.fromarray(deep).save(folder / "deep.png")
    Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).save(folder / "grey.png")
    (folder / "a.bin").write_bytes(b"\x07bytes")
    grey = np.repeat(np.arange(6, dtype=np.uint8).reshape(2, 3, 1), 3, axis=2)
    return {
        "audio": ("a.wav", sound),
        "pixels": ("deep.png", deep),
        "image": ("grey.png", grey),
        "bytes": ("a.bin", b"\x07bytes"),
        "a function": ("a.bin", 7),
    }


@pytest.mark.parametrize("decode", ["audio", "pixels", "image", "bytes", "a function"])
def test_what_decoders_give(tmp_path: Path, decode: str) -> None:
    name, wanted = make_files(tmp_path)[decode]
    how: Any = read_first_byte if decode == "a function" else decode
    source = FilesSource(pa.table({"file": [name]}), "file", decode=how, root=tmp_path, name="it")
    block = source.take(np.zeros(1, np.int64))
    found = block["it"][0]
    assert type(found) is type(wanted)
    np.testing.assert_array_equal(found, wanted)
    assert ("rate_hz" in block) == (decode == "audio")
    assert block.get("rate_hz", [16_000]) == [16_000]


def test_images_in_a_dataset_of_hugging_face() -> None:
    def encode(number: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(pixels(number)).save(stream, "png")
        return stream.getvalue()

    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": encode(n), "path": None} for n in range(3)], "label": [0, 1, 2]}
    source = FilesSource(datasets.Dataset.from_dict(rows, features=features), "image")
    block = source.take(np.array([2, 1]))
    assert [np.array_equal(found, pixels(n)) for found, n in zip(block["image"], (2, 1), strict=True)] == [True, True]
    assert block["label"].tolist() == [2, 1]
    assert source.with_fields(["image"]).take(np.array([0]))["image"][0].tolist() == pixels(0).tolist()


def test_columns_are_read_without_files(tmp_path: Path) -> None:
    source = FilesSource(write_images(tmp_path / "a"))
    (tmp_path / "a" / "3.png").unlink()
    assert source.columns("score")["score"].tolist() == [10 * item for item in range(N)]
    chosen = source.where("score > 60")
    assert chosen.take(np.array([0]))["image"][0].tolist() == pixels(7).tolist()


def test_batches_in_worker_processes(tmp_path: Path) -> None:
    source = FilesSource(write_images(tmp_path / "a"))
    plan = Plan(source.index, Shuffle(), batch_size=4, tail="short")
    with Loader(source, plan, num_workers=2, options=RunOptions(executor="processes")) as loader:
        for n, batch in enumerate(loader):
            items = plan.epoch(0).draw(n).items.tolist()
            assert [image.tolist() for image in batch["image"]] == [pixels(item).tolist() for item in items]
            assert batch["caption"] == [f"image {item}" for item in items]


class TestBadInput:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        return write_images(tmp_path / "a")

    def test_a_file_that_is_missing_is_named_with_its_row(self, table: Path) -> None:
        source = FilesSource(table)
        (table.parent / "5.png").unlink()
        with pytest.raises(ReadError, match=r"a/5\.png \(row 5\): No such file"):
            source.take(np.array([4, 5]))

    def test_a_file_that_cannot_be_decoded_is_named_with_its_row(self, table: Path) -> None:
        source = FilesSource(table)
        content = (table.parent / "6.png").read_bytes()
        for wrong in (b"no image", content[:-30], b""):
            (table.parent / "6.png").write_bytes(wrong)
            with pytest.raises(ReadError, match=r"a/6\.png as image \(row 6\)"):
                source.take(np.array([6]))

    def test_the_error_of_a_function_says_which_file_it_was(self, table: Path) -> None:
        def fail(path: str) -> int:
            return 1 if path.endswith(("0.png", "1.png")) else 1 // 0

        with pytest.raises(ZeroDivisionError) as raised:
            FilesSource(table, decode=fail).take(np.array([1, 2]))
        assert raised.value.__notes__[0].endswith("a/2.png (row 2)")

    def test_a_file_of_another_shape_is_named(self, table: Path) -> None:
        source = FilesSource(table, shape=(4, 5, 3))
        assert source.take(np.array([0, 3]))["image"].shape == (2, 4, 5, 3)
        with pytest.raises(ReadError, match=r"uint8 \(4, 5, 3\), got uint8 \(5, 5, 3\) \(.*a/1\.png, row 1\)"):
            source.take(np.array([1]))

    def test_deep_images_do_not_lose_bits_in_silence(self, tmp_path: Path) -> None:
        make_files(tmp_path)
        with pytest.raises(ReadError, match=r"deep\.png.*uint16, which 8 bits do not hold; use decode='pixels'"):
            FilesSource(pa.table({"path": ["deep.png"]}), root=tmp_path)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda t: FilesSource(t, "file"), "column must be one of 'path', 'caption', 'score', got 'file'"),
            (lambda t: FilesSource(t, "captoin"), r"got 'captoin'\. Did you mean 'caption'\?"),
            (lambda t: FilesSource(t, "score"), "column must hold paths, but 'score' holds int64"),
            (lambda t: FilesSource(t, decode="video"), "decode must be one of 'image'.*got 'video'"),
            (lambda t: FilesSource(t, name="caption"), r"The table has a column 'caption', too\. Choose another name"),
            (lambda t: FilesSource(t, shape=5), "shape must be a tuple"),
            (lambda t: FilesSource(t, decode="bytes", shape=(3,)), "needs files that hold arrays, got bytes"),
            (lambda t: FilesSource(t, chunk_items=0), "chunk_items must be an integer >= 1"),
            (lambda t: FilesSource(pa.table({"path": ["no.png"]})), r"no\.png \(row 0\): No such file"),
            (
                lambda t: FilesSource(pa.table({"path": ["a.png", None]}).slice(1)),
                "a path in every row, got None in row 0",
            ),
        ],
    )
    def test_arguments(self, table: Path, call: Any, message: str) -> None:
        with pytest.raises((OptionError, ReadError, SourceError), match=message):
            call(table)


def test_files_of_a_table_at_a_url_are_remote_as_the_table_is(tmp_path: Path) -> None:
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.arange(3) + number)
    with WebDatasetWriter(tmp_path / "table", shard_size=2) as writer:
        for number in range(6):
            writer.write_sample({"path": f"{number}.npy"})
    there = TarSource(f"file://{tmp_path / 'table'}", cache=tmp_path / "cache", cache_bytes=1 << 20)
    source = FilesSource(there, decode="npy", root=tmp_path)
    for each in (source, source.with_fields(["array"])):
        assert (each.is_remote, each.cache_bytes) == (True, 1 << 20)
        assert [array.tolist() for array in each.take(np.array([4, 1]))["array"]] == [[4, 5, 6], [1, 2, 3]]
        assert each.transfers is not None
        assert each.transfers.requests
        each.release(np.array([4, 1]))
    local = FilesSource(TarSource(tmp_path / "table"), decode="npy", root=tmp_path)
    assert (local.is_remote, local.cache_bytes, local.transfers) == (False, 0, None)
