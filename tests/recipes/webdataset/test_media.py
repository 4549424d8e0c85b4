"""Bytes of files (images, sounds, films, text) keep the extension that their field is named after."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import webdataset as wds
from penstock_webdataset_library import consumed, tars
from PIL import Image

from penstock import TarSource
from penstock.convert.to_shards import convert_to_shards
from penstock.core.errors import OptionError
from penstock.recipes.webdataset import WebDatasetWriter

N = 5


def pixels(i: int) -> np.ndarray[Any, Any]:
    return (np.arange(4 * 3 * 3).reshape(4, 3, 3) + i).astype(np.uint8)


def png(i: int) -> bytes:
    stored = io.BytesIO()
    Image.fromarray(pixels(i)).save(stored, "PNG")
    return stored.getvalue()


def wav(i: int) -> bytes:
    stored = io.BytesIO()
    soundfile.write(stored, np.arange(i, i + 8, dtype=np.int16), 8000, format="WAV")
    return stored.getvalue()


def files(i: int) -> dict[str, Any]:
    return {
        "png": png(i),
        "left.png": png(100 + i),
        "Right.PNG": png(200 - i),
        "wav": wav(i),
        "mp4": b"film %d" % i,
        "txt": f"text {i} ä".encode(),
        "json": b'{"n": %d}' % i,
        "raw": b"raw %d" % i,
    }


def write(folder: Path, make: Any = files) -> Path:
    with WebDatasetWriter(folder, shard_size=2) as writer:
        for i in range(N):
            writer.write_sample(make(i))
    return folder


def test_the_members_have_the_names_of_the_fields(tmp_path: Path) -> None:
    write(tmp_path)
    found = consumed(lambda: wds.WebDataset([str(path) for path in tars(tmp_path)], shardshuffle=False))
    assert len(found) == N
    for i, sample in enumerate(found):
        stored = {name: value for name, value in sample.items() if name[0] != "_" and name != "metadata.json"}
        assert stored == {("raw.bin" if name == "raw" else name.lower()): value for name, value in files(i).items()}


def test_images_text_and_json_come_back_decoded_under_the_same_names(tmp_path: Path) -> None:
    source = TarSource(write(tmp_path))
    assert list(source.fields) == [*files(0), "metadata"]
    block = source.take(np.array([4, 1]))
    for row, i in enumerate([4, 1]):
        assert block["png"][row].tobytes() == pixels(i).tobytes()
        assert block["left.png"][row].tobytes() == pixels(100 + i).tobytes()
        assert block["Right.PNG"][row].tobytes() == pixels(200 - i).tobytes()
        assert block["txt"][row] == f"text {i} ä"
        assert block["json"][row] == {"n": i}
        assert [block[name][row] for name in ("mp4", "raw")] == [files(i)[name] for name in ("mp4", "raw")]
        assert block["metadata"][row]["modalities"] == list(files(0))
    source.close()


def test_bytes_come_back_as_they_were_given_without_decoding(tmp_path: Path) -> None:
    source = TarSource(write(tmp_path), decode=False)
    assert [source.take(np.array([3]))[name][0] for name in files(3)] == list(files(3).values())
    source.close()


def test_a_string_and_a_dict_are_stored_under_txt_and_json_alone(tmp_path: Path) -> None:
    write(tmp_path, lambda i: {"txt": f"text {i}", "json": {"n": i}, "a.txt": f"other {i}", "a.json": [i]})
    source = TarSource(tmp_path)
    suffixes = [info.suffix for info in source.manifest.fields.values()]
    assert suffixes == ["txt", "json", "a.txt.txt", "a.json.json", "metadata.json"]
    block = source.take(np.array([2]))
    assert [block[name][0] for name in ("txt", "json", "a.txt", "a.json")] == ["text 2", {"n": 2}, "other 2", [2]]
    source.close()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("txt", b"\xff", "Field 'txt' must be valid txt, as its name says.*Rename it"),
        ("notes.txt", b"\xff", "Field 'notes.txt' must be valid txt"),
        ("json", b"{", "Field 'json' must be valid json"),
    ],
)
def test_bytes_that_are_not_what_the_name_says_are_refused(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        with pytest.raises(OptionError, match=match):
            writer.write_sample({name: content})
        writer.write_sample({"x": 1})


def test_a_later_sample_must_keep_the_kind_of_a_file(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({"Left.PNG": png(0)})
        writer.write_sample({"Left.PNG": png(1)})
        with pytest.raises(OptionError, match=r"Field 'Left\.PNG' must be Left\.PNG as in earlier samples, got uint8"):
            writer.write_sample({"Left.PNG": pixels(2)})


def test_a_resumed_writer_keeps_the_names(tmp_path: Path) -> None:
    writer = WebDatasetWriter(tmp_path, shard_size=2)
    for i in range(3):
        writer.write_sample(files(i))
    writer._writer.abandon()
    with WebDatasetWriter(tmp_path, shard_size=2, resume=True) as resumed:
        assert resumed.written == 2
        for i in range(2, N):
            resumed.write_sample(files(i))
    assert list(TarSource(tmp_path).fields) == [*files(0), "metadata"]


def test_shards_that_are_converted_keep_the_files_of_their_images(tmp_path: Path) -> None:
    write(tmp_path / "a")
    convert_to_shards(tmp_path / "a", tmp_path / "b", show_progress=False)
    source = TarSource(tmp_path / "b", decode=False)
    assert [info.suffix for info in source.manifest.fields.values()][:4] == ["png", "left.png", "Right.PNG", "wav"]
    assert source.take(np.array([3]))["png"][0] == png(3)
    source.close()
