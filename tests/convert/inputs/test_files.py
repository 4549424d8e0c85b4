"""Whole files as items: folders of images, arrays, and files that share a stem; their bytes are stored as they are."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from penstock import TarSource, convert_to_shards
from penstock.cli import app
from penstock.convert.convert import convert
from penstock.convert.formats import inputs_of
from penstock.convert.inputs.files import FilesInput
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import ConversionError, ReadError, SourceError
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions


def picture(number: int) -> NDArray[np.uint8]:
    """Return an image whose first pixel says which it is."""
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    pixels[0, 0] = number
    return pixels


def save(path: Path, number: int) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(number)).save(path)
    return path.read_bytes()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments])


def members(folder: Path) -> dict[str, bytes]:
    """Return the members of all shards, without metadata."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    return {name: content for name, content in found.items() if not name.endswith("metadata.json")}


def block(folder: Path, **options: Any) -> dict[str, Any]:
    source = TarSource(folder, **options)
    found = source.take(np.arange(len(source.index)))
    source.close()
    images = {name: np.stack(list(found[name])) for name in ("png", "jpg") if name in found}
    return {**found, **images}


def test_a_folder_of_images_keeps_their_bytes_and_its_subfolders_are_the_classes(tmp_path: Path) -> None:
    names = ["cat/1.png", "cat/deep/2.png", "dog/1.png", "ant/7.png", "dog/9.png"]
    stored = {name: save(tmp_path / "photos" / name, number) for number, name in enumerate(names)}
    (tmp_path / "photos" / ".hidden.png").write_bytes(b"x")
    (tmp_path / "photos" / "LICENSE").write_text("not an image, and in no class")
    done = run(str(tmp_path / "photos"), "-o", str(tmp_path / "out"), "--shard-size", "2")
    assert done.exit_code == 0, done.output
    assert "5 items in 3 shards" in done.output
    order = sorted(names)
    assert [members(tmp_path / "out")[f"sample_{n:09d}.png"] for n in range(5)] == [stored[name] for name in order]
    found = block(tmp_path / "out")
    assert found["png"].shape == (5, 4, 5, 3)
    assert found["png"][:, 0, 0, 0].tolist() == [names.index(name) for name in order]
    classes = [name.split("/")[0] for name in order]
    assert [about["class"] for about in found["metadata"]] == classes == ["ant", "cat", "cat", "dog", "dog"]
    assert [about["file"] for about in found["metadata"]] == [Path(name).name for name in order]
    assert found["label"].tolist() == [0, 1, 1, 2, 2]
    assert found["label"].dtype == np.int64
    about = Manifest.read(tmp_path / "out" / "dataset_metadata.json").metadata["conversion"]
    assert about["classes"] == {"class": ["ant", "cat", "dog"]}


def test_images_that_are_not_in_subfolders_have_no_class_unless_it_is_in_their_names(tmp_path: Path) -> None:
    for number, name in enumerate(["cat_1.png", "dog_2.png"]):
        save(tmp_path / "in" / name, number)
    convert_to_shards(tmp_path / "in", tmp_path / "out", show_progress=False)
    assert sorted(block(tmp_path / "out")) == ["metadata", "png"]
    pattern = ["--name-pattern", "(?P<kind>[a-z]+)_", "--label", "kind"]
    assert run(str(tmp_path / "in" / "*.png"), "-o", str(tmp_path / "named"), *pattern).exit_code == 0
    assert block(tmp_path / "named")["label"].tolist() == [0, 1]


def test_classes_split_by_a_column_stay_the_same_numbers_in_every_split(tmp_path: Path) -> None:
    for number in range(12):
        save(tmp_path / "in" / "abc"[number % 3] / f"{number // 3}.png", number)
    options = ["--split", "train=0.5,val=0.5", "--name-pattern", r"(?P<session>\d)$", "--group-by", "session"]
    done = run(str(tmp_path / "in"), "-o", str(tmp_path / "out"), *options)
    assert done.exit_code == 0, done.output
    sessions = {}
    for name in ("train", "val"):
        found = block(tmp_path / "out" / name)
        sessions[name] = {about["session"] for about in found["metadata"]}
        assert ["abc"[label] for label in found["label"]] == [about["class"] for about in found["metadata"]]
    assert sorted(sessions["train"] | sessions["val"]) == ["0", "1", "2", "3"]
    assert not sessions["train"] & sessions["val"]


def test_files_that_share_a_stem_are_one_item(tmp_path: Path) -> None:
    stored = {}
    for number in range(3):
        stored[f"{number}.png"] = save(tmp_path / "in" / f"v1.{number}.PNG", number)
        (tmp_path / "in" / f"v1.{number}.txt").write_text(f"caption {number} ü")
        (tmp_path / "in" / f"v1.{number}.json").write_text(json.dumps({"n": number}))
        (tmp_path / "in" / f"v1.{number}.cls").write_text(f"{number + 10}\n")
        np.save(tmp_path / "in" / f"v1.{number}.npy", np.full((2,), number, np.int16))
    convert_to_shards(tmp_path / "in", tmp_path / "out", show_progress=False)
    found = block(tmp_path / "out")
    assert found["png"][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert list(found["txt"]) == [f"caption {n} ü" for n in range(3)]
    assert list(found["json"]) == [{"n": n} for n in range(3)]
    assert found["cls"].tolist() == [10, 11, 12]
    assert found["data"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert members(tmp_path / "out")["sample_000000001.txt"] == "caption 1 ü".encode()
    assert [about["file"] for about in found["metadata"]] == [f"v1.{n}.PNG" for n in range(3)]


def test_a_compressed_file_has_the_stem_of_what_is_compressed(tmp_path: Path) -> None:
    volumes = [gzip.compress(bytes([number]) * 100, mtime=0) for number in range(2)]
    for number, volume in enumerate(volumes):
        stem = tmp_path / "in" / f"sub-0{number}_v1.{number}_bold"
        stem.parent.mkdir(exist_ok=True)
        stem.with_name(f"{stem.name}.nii.gz").write_bytes(volume)
        stem.with_name(f"{stem.name}.json").write_text(json.dumps({"n": number}))
    convert_to_shards(tmp_path / "in", tmp_path / "out", format="files", show_progress=False)
    found = block(tmp_path / "out")
    assert list(found["nii.gz"]) == volumes
    assert list(found["json"]) == [{"n": 0}, {"n": 1}]


def test_whole_arrays_are_items_of_their_own_shapes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(6):
        np.save(tmp_path / "in" / f"{number}.npy", np.full((number + 1, 2), number, np.float32))
    pattern = str(tmp_path / "in" / "*.npy")
    assert "21 items" in run(pattern, "-o", str(tmp_path / "rows")).output
    done = run(pattern, "-o", str(tmp_path / "out"), "--format", "files")
    assert "6 items in 1 shard" in done.output
    for number, array in enumerate(block(tmp_path / "out")["data"]):
        np.testing.assert_array_equal(array, np.full((number + 1, 2), number, np.float32))


def test_the_arrays_of_whole_archives_are_fields(tmp_path: Path) -> None:
    for number in range(3):
        np.savez_compressed(tmp_path / f"{number}.npz", x=np.arange(number + 1), y=np.float64(number))
    convert_to_shards(str(tmp_path / "*.npz"), tmp_path / "out", format="files", show_progress=False)
    found = block(tmp_path / "out")
    assert [array.tolist() for array in found["x"]] == [[0], [0, 1], [0, 1, 2]]
    assert found["y"].tolist() == [0, 1, 2]


def test_images_of_several_formats_share_the_field_of_most_of_them(tmp_path: Path, caplog: Any) -> None:
    names = ["a.jpg", "b.jpeg", "c.png", "d.JPG"]
    stored = [save(tmp_path / "in" / name, number) for number, name in enumerate(names)]
    convert_to_shards(tmp_path / "in", tmp_path / "out", show_progress=False)
    assert [members(tmp_path / "out")[f"sample_{n:09d}.jpg"] for n in range(4)] == stored
    assert "stored in the field 'jpg', as they are: 1 png among them" in caplog.text
    expected = [np.asarray(Image.open(io.BytesIO(content))) for content in stored]
    np.testing.assert_array_equal(block(tmp_path / "out")["jpg"], expected)


def test_an_image_and_its_mask_are_two_fields(tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path / "in" / f"{number}.jpg", number)
        save(tmp_path / "in" / f"{number}.png", 100 + number)
    convert_to_shards(tmp_path / "in", tmp_path / "out", show_progress=False)
    found = block(tmp_path / "out")
    assert found["jpg"].shape == found["png"].shape == (2, 4, 5, 3)
    assert found["png"][:, 0, 0, 0].tolist() == [100, 101]


def test_files_that_belong_to_no_image_are_left_out_and_named(tmp_path: Path, caplog: Any) -> None:
    save(tmp_path / "in" / "a.png", 1)
    (tmp_path / "in" / "README.md").write_text("hello")
    (tmp_path / "in" / "Thumbs.db").write_text("hello")
    convert_to_shards(tmp_path / "in", tmp_path / "out", show_progress=False)
    assert "Left out 1 of the files (README.md): no image has the same stem." in caplog.text
    assert sorted(block(tmp_path / "out")) == ["metadata", "png"]


def test_items_that_lack_a_file_are_listed_on_at_most_20_lines(tmp_path: Path) -> None:
    for number in range(40):
        save(tmp_path / "in" / f"{number:02d}.png", number)
        if number < 10:
            (tmp_path / "in" / f"{number:02d}.txt").write_text("x")
    with pytest.raises(SourceError, match=r"the same files \(png, txt\), but 30 of 40 lack some") as caught:
        inputs_of([tmp_path / "in"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[1] == f"  {tmp_path / 'in' / '10.png'}: no txt"
    assert lines[-1] == "  … and 11 more"


def test_every_file_of_an_item_must_stay_the_same_until_it_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path / "a.png", 1)
    (tmp_path / "a.txt").write_text("before")
    given = FilesInput(tmp_path / "a.png", (("png", "a.png"), ("txt", "a.txt")))
    first = convert([given], tmp_path / "1")[""].metadata["conversion"]["inputs"][0]
    (tmp_path / "a.txt").write_text("behind")
    second = convert([given], tmp_path / "2")[""].metadata["conversion"]["inputs"][0]
    assert first["digest"] != second["digest"]

    def change(phase: str, unit: str, done: int, total: int, current: str) -> None:
        if phase == "Writing" and not done:
            (tmp_path / "a.txt").write_text("changed meanwhile")

    with pytest.raises(ConversionError, match="changed while it was converted"):
        convert([given], tmp_path / "3", on_progress=change)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, all_samples: Any) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(SourceError, match=r"must not be empty, but .*a\.png is"):
        FilesInput(tmp_path / "a.png").open()
    (tmp_path / "a.npy").write_bytes(b"no array")
    with pytest.raises(SourceError, match=r"Could not convert .*a\.npy"):
        FilesInput(tmp_path / "a.npy").open()
    with pytest.raises(ReadError, match=r"none\.png"):
        FilesInput(tmp_path / "none.png").open()
    (tmp_path / "b.json").write_text("{")
    with pytest.raises((SourceError, ConversionError, ValueError), match="must be valid json"):
        convert([FilesInput(tmp_path / "b.json")], tmp_path / "out", ConvertOptions(WriteOptions(2)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="No files in"):
        inputs_of([tmp_path / "empty"], "files")
    with pytest.raises(SourceError, match="shards, audio files or images"):
        inputs_of([tmp_path / "empty"])


def test_one_file_obeys_the_laws_of_a_recording(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    recording = FilesInput(tmp_path / "a.npy").open()
    ((fields, metadata),) = recording.samples(np.array([0]))
    assert fields["data"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert metadata == {"file": "a.npy", "folder": tmp_path.name}
    assert recording.span(np.array([0])).tolist() == [[0, 1]]
    with pytest.raises(ReadError, match="items 0–0"):
        list(recording.samples(np.array([1])))
    recording.close()
