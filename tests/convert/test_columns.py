"""Metadata columns from names of files, tables and functions: written with items, read by splits and labels."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from penstock_convert_parts import tree

from penstock import TarSource, convert_to_shards
from penstock.convert.columns import Columns
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.inputs.arrays import NpyInput, NpzInput
from penstock.convert.inputs.audio import ClipInput
from penstock.convert.inputs.function import FunctionInput
from penstock.convert.inputs.protocol import Input
from penstock.convert.inputs.source import ShardsInput
from penstock.convert.inputs.zarr import ZarrInput
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.core.errors import ConversionError, OptionError, SourceError
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

SPEAKERS, WORDS = ("ann", "bob", "cleo"), ("no", "yes")
PATTERN = r"^(?P<speaker>[a-z]+)_(?P<word>[a-z]+)$"
HALVES = (("a", 0.5), ("b", 0.5))


def items(folder: Path) -> list[dict[str, Any]]:
    """Return the metadata of each item, with its first value as `value`, and its label if it has one."""
    source = TarSource(folder)
    block = source.take(np.arange(len(source.index)))
    source.close()
    field = next(name for name in block if name not in ("metadata", "label"))
    extra = [{"label": int(label)} for label in block["label"]] if "label" in block else [{}] * len(block[field])
    return [
        {**about, **more, "value": float(np.ravel(value)[0])}
        for about, value, more in zip(block["metadata"], block[field], extra, strict=True)
    ]


def rows_of(number: int, n_rows: int = 3) -> NDArray[np.float32]:
    """Return rows whose values say where they are: 10 x file + row."""
    return (10 * number + np.arange(n_rows, dtype=np.float32))[:, None]


def yield_rows(path: Path) -> Iterator[Any]:
    for row in np.load(path):
        yield {"data": row}


def make_input(kind: str, folder: Path, name: str, number: int) -> Input:
    if kind in ("npy", "function"):
        np.save(folder / f"{name}.npy", rows_of(number))
        path = folder / f"{name}.npy"
        return NpyInput(path) if kind == "npy" else FunctionInput(path, yield_rows)
    if kind == "npz":
        np.savez(folder / f"{name}.npz", data=rows_of(number))
        return NpzInput(folder / f"{name}.npz")
    if kind == "zarr":
        zarr = pytest.importorskip("zarr")
        zarr.save_array(folder / f"{name}.zarr", rows_of(number))
        return ZarrInput(folder / f"{name}.zarr")
    if kind == "shards":
        writer = ShardWriter(folder / name, WriteOptions(2))
        for row in rows_of(number):
            writer.write({"data": row}, None, None)
        writer.commit()
        return ShardsInput(folder / name)
    soundfile.write(folder / f"{name}.wav", rows_of(number) / 2**15, 8000, subtype="PCM_16")
    return ClipInput(folder / f"{name}.wav")


@pytest.fixture(params=["npy", "npz", "zarr", "function", "shards", "audio"])
def inputs(request: pytest.FixtureRequest, tmp_path: Path) -> list[Input]:
    (tmp_path / "in").mkdir()
    pairs = itertools.product(SPEAKERS, WORDS)
    return [make_input(request.param, tmp_path / "in", "_".join(p), n) for n, p in enumerate(pairs)]


@pytest.fixture
def files(tmp_path: Path) -> list[Input]:
    (tmp_path / "in").mkdir()
    pairs = itertools.product(SPEAKERS, WORDS)
    return [make_input("npy", tmp_path / "in", "_".join(p), n) for n, p in enumerate(pairs)]


# -- every input passes them on ----------------------------------------------------------------------------------------


def test_columns_of_names_and_tables_are_written_with_the_items_of_every_input(
    inputs: list[Input], tmp_path: Path
) -> None:
    (tmp_path / "people.csv").write_text("speaker,age\nann,31\nbob,\ncleo,8\nnobody,99\n")
    columns = Columns(PATTERN, tmp_path / "people.csv", "speaker", label="word")
    options = ConvertOptions(WriteOptions(4), Split(HALVES, "speaker"), columns=columns)
    manifests = convert(inputs, tmp_path / "out", options)
    found = {name: items(tmp_path / "out" / name) for name in "ab"}
    everything = sorted((*found["a"], *found["b"]), key=lambda item: item["value"])
    assert len(everything) in (6, 18)
    for item in everything:
        number = round(item["value"] * (2**15 if len(everything) == 6 else 1)) // 10
        speaker, word = SPEAKERS[number // 2], WORDS[number % 2]
        assert (item["speaker"], item["word"], item["label"]) == (speaker, word, number % 2)
        assert item["age"] == {"ann": 31, "bob": None, "cleo": 8}[speaker]
    assert {item["speaker"] for item in found["a"]} & {item["speaker"] for item in found["b"]} == set()
    about = manifests["a"].metadata["conversion"]
    assert about["classes"] == {"word": ["no", "yes"]}
    assert about["split"]["group_by"] == "speaker"


def test_the_bytes_are_the_same_for_any_number_of_workers(files: list[Input], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("file,age\n" + "".join(f"{f.path.name},{n}\n" for n, f in enumerate(files)))
    options = ConvertOptions(WriteOptions(4), columns=Columns(PATTERN, tmp_path / "t.csv", label="age"))
    for workers in (1, 2):
        convert(files, tmp_path / str(workers), options, engine=LocalEngine(workers))
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    found = items(tmp_path / "1")
    assert sorted(item["value"] for item in found) == [10 * n + row for n in range(6) for row in range(3)]
    assert all(item["age"] == item["label"] == item["value"] // 10 for item in found)


def test_resuming_needs_the_same_columns(files: list[Input], tmp_path: Path) -> None:
    convert(files, tmp_path / "out", ConvertOptions(columns=Columns(PATTERN)))
    before = tree(tmp_path / "out")
    convert(files, tmp_path / "out", ConvertOptions(columns=Columns(PATTERN)), existing="resume")
    assert tree(tmp_path / "out") == before
    for other in (Columns(), Columns(r"^(?P<speaker>[a-z]+)"), Columns(PATTERN, label="word")):
        with pytest.raises(OptionError, match="same inputs and options"):
            convert(files, tmp_path / "out", ConvertOptions(columns=other), existing="resume")


# -- files and rows that do not fit ------------------------------------------------------------------------------------


def test_files_that_the_pattern_does_not_match_are_listed_on_at_most_20_lines(tmp_path: Path) -> None:
    given = [make_input("npy", tmp_path, f"tape{n:02d}", n) for n in range(30)]
    given.append(make_input("npy", tmp_path, "ann_yes", 30))
    with pytest.raises(SourceError, match="does not match that of 30 of 31") as caught:
        convert(given, tmp_path / "out", ConvertOptions(columns=Columns(PATTERN)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[1] == f"  {tmp_path / 'tape00.npy'}"
    assert lines[-1] == "  … and 11 more"
    assert not (tmp_path / "out").exists()


def test_files_without_a_row_and_rows_that_repeat_are_listed(files: list[Input], tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("file,x\nann_no.npy,1\nann_yes,2\nin/bob_no.npy,3\n")
    with pytest.raises(SourceError, match=r"a row for every file, but in its column 'file' 3 of 6 are missing") as one:
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns(table=table)))
    assert str(one.value).splitlines()[1:] == ["  bob_yes.npy", "  cleo_no.npy", "  cleo_yes.npy"]
    table.write_text("file,x\na,1\nb,2\na,3\nc,4\nc,5\nc,6\n")
    with pytest.raises(SourceError, match="a 'file' of its own, but 2 occur several times") as two:
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns(table=table)))
    assert str(two.value).splitlines()[1:] == ["  a (2 rows)", "  c (3 rows)"]
    with pytest.raises(SourceError, match=r"key must be a column of .*t\.csv, which has file, x, got 'clip'"):
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns(table=table, key="clip")))


def test_a_file_is_found_by_its_name_its_stem_or_the_end_of_its_path(files: list[Input], tmp_path: Path) -> None:
    ways = ["ann_no.npy", "ann_yes", "in/bob_no.npy", "./in/bob_yes", str(files[4].path), "cleo_yes.npy"]
    (tmp_path / "t.csv").write_text("clip,x\n" + "".join(f"{way},{n}\n" for n, way in enumerate(ways)))
    convert(files, tmp_path / "out", ConvertOptions(columns=Columns(table=tmp_path / "t.csv", key="clip")))
    assert [item["x"] for item in items(tmp_path / "out")] == [n for n in range(6) for _ in range(3)]


def test_a_row_that_names_two_files_is_refused(tmp_path: Path) -> None:
    for folder in ("left", "right"):
        (tmp_path / folder).mkdir()
    given = [make_input("npy", tmp_path / folder, "a", n) for n, folder in enumerate(("left", "right"))]
    (tmp_path / "t.csv").write_text("file,x\na.npy,1\n")
    with pytest.raises(SourceError, match="must name one file, but 1 name several"):
        convert(given, tmp_path / "out", ConvertOptions(columns=Columns(table=tmp_path / "t.csv")))
    (tmp_path / "t.csv").write_text("file,x\nleft/a.npy,1\nright/a.npy,2\n")
    convert(given, tmp_path / "out", ConvertOptions(columns=Columns(table=tmp_path / "t.csv")))
    assert [item["x"] for item in items(tmp_path / "out")] == [1, 1, 1, 2, 2, 2]


def test_a_pattern_with_a_slash_sees_the_folders(tmp_path: Path) -> None:
    for folder in ("sub-01", "sub-02"):
        (tmp_path / folder).mkdir()
    given = [make_input("npy", tmp_path / f"sub-0{n}", "rows", n) for n in (1, 2)]
    convert(given, tmp_path / "out", ConvertOptions(columns=Columns(r"sub-(?P<subject>\d+)/")))
    assert [(item["subject"], item["value"]) for item in items(tmp_path / "out")] == [
        (f"0{n}", 10 * n + row) for n in (1, 2) for row in range(3)
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"name_pattern": "(?P<a>"}, "name_pattern must be a regular expression"),
        ({"name_pattern": "a_(b)"}, "name_pattern must have named groups"),
        ({"key": "clip"}, "key needs a table"),
    ],
)
def test_invalid_columns_are_refused_at_once(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Columns(**columns)


def test_metadata_of_items_are_never_replaced(files: list[Input], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("clip,row\n" + "".join(f"{given.path.name},77\n" for given in files))
    with pytest.raises(SourceError, match=r"ann_no\.npy have row=0 already, but .* says row=77"):
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns(table=tmp_path / "t.csv", key="clip")))
    (tmp_path / "t.csv").write_text("clip,word\n" + "".join(f"{given.path.name},x\n" for given in files))
    with pytest.raises(OptionError, match="must not have the name sample_id"):
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns("(?P<sample_id>.+)")))
    with pytest.raises(OptionError, match="word is in both"):
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns(PATTERN, tmp_path / "t.csv", "clip")))


# -- columns of single items -------------------------------------------------------------------------------------------


def yield_trials(path: Path) -> Iterator[Any]:
    first = int(path.stem)
    for row in range(6):
        yield {"x": np.float32(first + row)}, {"subject": f"s{row % 3}", "sample_id": f"trial.{first + row}"}


def test_items_of_one_function_are_split_by_a_column_of_their_own(tmp_path: Path) -> None:
    given = []
    for first in (0, 100):
        (tmp_path / f"{first}.txt").touch()
        given.append(FunctionInput(tmp_path / f"{first}.txt", yield_trials))
    split = Split((("a", 0.34), ("b", 0.33), ("c", 0.33)), "subject")
    convert(given, tmp_path / "out", ConvertOptions(WriteOptions(2), split, columns=Columns(label="subject")))
    seen = {}
    for name in "abc":
        found = items(tmp_path / "out" / name)
        (subject,) = {item["subject"] for item in found}
        seen[subject] = [item["value"] for item in found]
        assert {item["label"] for item in found} == {int(subject[1])}
    assert seen == {f"s{n}": [n, n + 3, 100 + n, 103 + n] for n in range(3)}


def test_shards_are_split_by_a_column_of_their_items_and_joined_with_a_table_by_their_files(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "before", WriteOptions(4))
    for number in range(12):
        writer.write({"x": np.float32(number)}, None, {"file": f"clip{number % 4}.wav", "side": "LR"[number % 2]})
    writer.commit()
    (tmp_path / "t.csv").write_text("file,age\n" + "".join(f"clip{n},{20 + n}\n" for n in range(4)))
    columns = Columns(r"clip(?P<clip>\d)", tmp_path / "t.csv")
    convert(
        [ShardsInput(tmp_path / "before")],
        tmp_path / "out",
        ConvertOptions(split=Split(HALVES, "side"), columns=columns),
    )
    found = [items(tmp_path / "out" / name) for name in "ab"]
    assert sorted([[item["value"] for item in part] for part in found]) == [[*range(0, 12, 2)], [*range(1, 12, 2)]]
    for item in (*found[0], *found[1]):
        assert (item["clip"], item["age"]) == (str(int(item["value"]) % 4), 20 + item["value"] % 4)


def test_a_column_that_no_item_has_is_refused_with_those_that_there_are(files: list[Input], tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"ann_no\.npy does not say which subject it belongs to.* It has 'file', 'row'\."
    ):
        convert(files, tmp_path / "out", ConvertOptions(split=Split(HALVES, "subject")))
    with pytest.raises(SourceError, match=r"does not say which age it belongs to \(label='age'\)"):
        convert(files, tmp_path / "out", ConvertOptions(columns=Columns(label="age")))


def yield_labels(path: Path) -> Iterator[Any]:
    yield {"label": 3}, {"kind": "a"}


def test_a_label_does_not_replace_a_field(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    given = [FunctionInput(tmp_path / "a.txt", yield_labels)]
    with pytest.raises(ConversionError, match="must have no field 'label' of their own"):
        convert(given, tmp_path / "out", ConvertOptions(columns=Columns(label="kind")))


# -- ids ---------------------------------------------------------------------------------------------------------------


def ids(folder: Path) -> list[tuple[str, float]]:
    return [(item["sample_id"], item["value"]) for item in items(folder)]


def test_ids_of_a_function_are_those_of_the_items_also_after_further_conversions(tmp_path: Path) -> None:
    (tmp_path / "0.txt").touch()
    options = ConvertOptions(WriteOptions(4))
    convert([FunctionInput(tmp_path / "0.txt", yield_trials)], tmp_path / "1", options)
    convert([ShardsInput(tmp_path / "1")], tmp_path / "2", options)
    for folder in (tmp_path / "1", tmp_path / "2"):
        assert sorted(ids(folder)) == [(f"trial.{n}", n) for n in range(6)]
    assert "trial%2E3.x.npy" in b"".join(path.read_bytes() for path in (tmp_path / "2").glob("*.tar")).decode("latin1")


def test_merging_datasets_with_equal_ids_says_so_and_keeps_them_as_original_ids(tmp_path: Path, caplog: Any) -> None:
    for name, start in (("x", 0), ("y", 4)):
        writer = ShardWriter(tmp_path / name, WriteOptions(4))
        for number in range(start, start + 6):
            writer.write({"x": np.float32(number)}, f"trial-{number}", None)
        writer.commit()
    convert_to_shards([tmp_path / "x", tmp_path / "y"], tmp_path / "out", show_progress=False)
    manifest = Manifest.read(tmp_path / "out" / "dataset_metadata.json")
    note = "2 sample ids (trial-4, trial-5) occur more than once in these inputs. All items get new ids; the others"
    assert note in caplog.text
    assert manifest.metadata["conversion"]["notes"][0].startswith(note)
    found = items(tmp_path / "out")
    numbers = [*range(6), *range(4, 10)]
    assert [item["sample_id"] for item in found] == [f"sample_{n:09d}" for n in range(12)]
    assert [(item["original_id"], item["value"]) for item in found] == [(f"trial-{n}", n) for n in numbers]


def test_merging_datasets_with_automatic_or_different_ids_is_silent(tmp_path: Path, caplog: Any) -> None:
    for name, start, prefix in (("x", 0, "trial-"), ("y", 6, None), ("z", 12, None)):
        writer = ShardWriter(tmp_path / name, WriteOptions(4))
        for number in range(start, start + 6):
            writer.write({"x": np.float32(number)}, f"{prefix}{number}" if prefix else None, None)
        writer.commit()
    convert_to_shards([tmp_path / name for name in "xyz"], tmp_path / "out", show_progress=False)
    assert caplog.text == ""
    expected = [f"trial-{n}" if n < 6 else f"sample_{n:09d}" for n in range(18)]
    assert ids(tmp_path / "out") == [(sample_id, n) for n, sample_id in enumerate(expected)]
    assert "notes" not in Manifest.read(tmp_path / "out" / "dataset_metadata.json").metadata["conversion"]


def yield_numbers_as_ids(path: Path) -> Iterator[Any]:
    yield {"x": 1}, {"sample_id": 7}


def test_an_id_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConversionError, match=r"sample_id must be a non-empty string .* yields 7 for item 0"):
        convert([FunctionInput(tmp_path / "a.txt", yield_numbers_as_ids)], tmp_path / "out")
