"""Ids, fields and metadata come back as they were given; invalid ones are refused by name and leave no trace."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import TarSource
from penstock.core.errors import OptionError
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from tests.shard.samples import contents, ids, metadata, numbers, open_files_in, sample, start_writer, write

STRANGE = [
    "sub-01.ses-2",
    "sub-01",
    "sub-01%2Eses-2",
    "a/b",
    "a\\b",
    "..",
    ".",
    "../../etc/passwd",
    "é",
    "e\u0301",
    "A",
    "a",
    " ",
    "日本",
    "x\ny",
    "sample_1",
]


def test_strange_ids_come_back_and_are_not_merged(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    for number, one in enumerate(STRANGE):
        writer.write(sample(number), one, None)
    writer.commit()
    assert ids(tmp_path) == STRANGE
    with tarfile.open(tmp_path / "shard_000000.tar") as tar:
        assert all("/" not in name and not name.startswith(".") for name in tar.getnames())


@pytest.mark.parametrize("when", [1, 4])
def test_a_repeated_id_is_refused(when: int, tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    for number in range(6):
        if number == when:
            writer.write(sample(number), "one", None)
        else:
            writer.write(sample(number), None, None)
    with pytest.raises(OptionError, match="must be unique, got 'one' again for sample 6"):
        writer.write(sample(6), "one", None)
    with pytest.raises(OptionError, match="sample_id must be unique"):
        writer.write(sample(6), "sample_000000000", None)
    writer.write(sample(6), None, None)
    writer.commit()
    assert len(set(ids(tmp_path))) == 7


def test_an_id_equal_to_a_later_automatic_key_is_refused(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    writer.write(sample(0), "sample_000000002", None)
    writer.write(sample(1), None, None)
    with pytest.raises(OptionError, match="sample_id must be unique"):
        writer.write(sample(2), None, None)
    writer.write(sample(2), "another", None)
    writer.commit()
    assert ids(tmp_path) == ["sample_000000002", "sample_000000001", "another"]


def test_an_id_from_before_a_resume_is_remembered(tmp_path: Path) -> None:
    first = start_writer(tmp_path, shard_size=2)
    first.write(sample(0), "sample_000000003", None)
    first.write(sample(1), None, None)
    first.abandon()
    second = ShardWriter(tmp_path, WriteOptions(shard_size=2), resume=True)
    assert second.written == 2
    second.write(sample(2), None, None)
    with pytest.raises(OptionError, match="sample_id must be unique"):
        second.write(sample(3), None, None)
    with pytest.raises(OptionError, match="sample_id must be unique"):
        second.write(sample(3), "sample_000000003", None)
    second.abandon()


@pytest.mark.parametrize("sample_id", ["", 7, b"a", "\ud800"])
def test_an_invalid_id_is_refused(sample_id: Any, tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    with pytest.raises(OptionError, match="sample_id must be"):
        writer.write(sample(0), sample_id, None)
    writer.abandon()


@pytest.mark.parametrize("names", [["sample_id"], ["modalities"], ["shard_idx", "sample_idx_in_shard"]])
def test_names_in_metadata_that_the_writer_sets_are_refused(names: list[str], tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    trial = {"trial": {"side": "é"}}
    with pytest.raises(OptionError, match=rf"metadata must not have the names .*, got {', '.join(names)}\. Rename"):
        writer.write(sample(0), "right", {**dict.fromkeys(names, 99), **trial})
    writer.write(sample(0), "right", trial)
    writer.commit()
    (about,) = metadata(tmp_path)
    assert about == {
        "sample_id": "right",
        "modalities": ["x", "note"],
        "shard_idx": 0,
        "sample_idx_in_shard": 0,
        "trial": {"side": "é"},
    }


@pytest.mark.parametrize("value", [{"a": "\0place\0"}, {"\0place\0": 1}, {"a": '","shard_idx":7,"b":"'}])
def test_metadata_are_kept_whatever_they_contain(value: dict[str, Any], tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    writer.write(sample(0), "\0place\0", value)
    writer.commit()
    (about,) = metadata(tmp_path)
    assert about == {
        "sample_id": "\0place\0",
        "modalities": ["x", "note"],
        "shard_idx": 0,
        "sample_idx_in_shard": 0,
        **value,
    }


REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "not a dict": ([1, 2], None, None, "must be a dict"),
    "nothing": ({}, None, None, "at least one field"),
    "None": (None, None, None, "must be a dict"),
    "a field less": ({"x": np.zeros(2, np.int32)}, None, None, r"lacks \['note'\]"),
    "a field more": ({**sample(1), "y": 1}, None, None, r"adds \['y'\]"),
    "another dtype": ({"x": np.zeros(2), "note": "a"}, None, None, "'x' must be int32 .* got float64 in sample 1"),
    "another kind": ({"x": "text", "note": "a"}, None, None, "'x' must be int32 .* got txt in sample 1"),
    "array for text": (
        {"x": np.zeros(2, np.int32), "note": np.zeros(2)},
        None,
        None,
        "'note' must be note.txt .* got float64 in sample 1",
    ),
    "objects": ({"x": np.array([None]), "note": "a"}, None, None, "Python objects"),
    "metadata of objects": (sample(1), None, {"a": object()}, "must be a string, number, list or dict"),
    "metadata of NaN": (sample(1), None, {"a": float("nan")}, "got nan"),
    "metadata of numbers": (sample(1), None, {7: 1}, "must be strings, got 7"),
    "metadata that is not a dict": (sample(1), None, [1], "metadata must be a dict"),
    "invalid text": ({**sample(1), "note": "\ud800"}, None, None, "'note'"),
    "an id of 200 letters": (sample(1), "i" * 200, None, "at most 100 bytes"),
    "an id that is not text": (sample(1), 7, None, "sample_id must be .* got 7"),
    "a repeated id": (sample(1), "sample_000000000", None, "sample_id must be unique"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_refused_sample_leaves_no_trace(kind: str, place: int, tmp_path: Path) -> None:
    bad, bad_id, about, match = REFUSED[kind]
    for folder in ("with", "without"):
        writer = start_writer(tmp_path / folder)
        for number in range(5):
            if (
                number == place
                and folder == "with"
                and (
                    place
                    or kind
                    not in (
                        "a field less",
                        "a field more",
                        "another dtype",
                        "another kind",
                        "array for text",
                        "a repeated id",
                    )
                )
            ):
                with pytest.raises(OptionError, match=match.replace("sample 1", f"sample {place}")):
                    writer.write(bad, bad_id, about)
                assert writer.written == place
            writer.write(sample(number), None, None)
        writer.commit()
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_a_sample_that_is_refused_at_the_end_of_a_shard_does_not_end_it(tmp_path: Path) -> None:
    for folder in ("with", "without"):
        writer = start_writer(tmp_path / folder, shard_size=100, max_shard_bytes=3 * 3584 + 1024)
        for number in range(4):
            # It would need another shard, and is refused for its name.
            if number == 1 and folder == "with":
                with pytest.raises(OptionError, match="at most 100 bytes"):
                    writer.write({"x": np.zeros(800, np.int32), "note": "a" * 4000}, "i" * 200, None)
            writer.write(sample(number), None, None)
        writer.commit()
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_a_refused_sample_leaves_no_file_open(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, shard_size=1)
    writer.write(sample(0), None, None)
    with pytest.raises(OptionError):
        writer.write(sample(1), "i" * 200, None)
    writer.commit()
    assert open_files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"x": 1, "X": 2}, "differ in more than case"),
        ({"metadata": 1}, "is reserved"),
        ({"Metadata": 1}, "(is reserved|differ in more than case)"),
        ({"a/b": 1}, "slash"),
        ({"__key__": "a"}, "is reserved"),
        ({7: 1}, "A field name must be"),
        ({"f" * 90: 1}, "at most 100 bytes"),
    ],
)
def test_ambiguous_fields_are_refused(fields: Any, match: str, tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    with pytest.raises(OptionError, match=match):
        writer.write(fields, None, None)
    writer.write(sample(0), None, None)
    writer.commit()
    assert numbers(tmp_path) == [0]


def test_fields_with_dots_and_unicode_come_back(tmp_path: Path) -> None:
    fields = {"lfp.left": 1, "é": 2.5, "x.npy": "text", "json": [1], "a b": b"\0"}
    writer = start_writer(tmp_path)
    writer.write(fields, None, None)
    writer.commit()
    source = TarSource(tmp_path)
    assert set(source.fields) == {*fields, "metadata"}
    found = source.take(np.array([0]))
    assert {name: found[name][0] for name in fields} == fields


def test_fields_may_come_in_another_order(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    writer.write({"x": 1, "y": 2}, None, None)
    writer.write({"y": 20, "x": 10}, None, None)
    writer.commit()
    found = TarSource(tmp_path).take(np.arange(2))
    assert (found["x"].tolist(), found["y"].tolist()) == ([1, 10], [2, 20])


def test_a_row_of_a_tensor_is_stored_alone(tmp_path: Path) -> None:
    rows = torch.arange(100_000).reshape(1000, 100)
    for array_format in ("npy", "pyd"):
        write(tmp_path / array_format, 3, make=lambda n: {"x": rows[n]}, array_format=array_format)
        assert (tmp_path / array_format / "shard_000000.tar").stat().st_size < 3 * (4 * 512 + 1024) + 2048
