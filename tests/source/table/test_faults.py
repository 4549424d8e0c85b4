"""What is wrong with a table is said by name: at once where that is known, else when it is read."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from penstock import DamageError, MissingDependency, OptionError, ReadError, SourceError, Span, TableSource
from penstock.source.native import is_compiled

N = 1000


@pytest.fixture
def table() -> pa.Table:
    return pa.table({"x": np.arange(N), "y": np.arange(N) / 4})


def write(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False)
    else:
        feather.write_feather(table, path, compression="uncompressed", chunksize=100)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
class TestFilesThatChange:
    def test_a_file_that_is_replaced_is_a_read_error(self, table: pa.Table, tmp_path: Path, name: str) -> None:
        source = TableSource(write(table, tmp_path / name), decoded_bytes=0)
        assert source.take(np.array([7]))["x"].tolist() == [7]
        write(table.slice(1), tmp_path / name)
        with pytest.raises(ReadError, match=rf"{name} has changed since the source was made"):
            source.take(np.array([7]))

    def test_a_file_that_is_truncated_is_a_read_error(self, table: pa.Table, tmp_path: Path, name: str) -> None:
        source = TableSource(write(table, tmp_path / name), decoded_bytes=0)
        source.take(np.array([7]))
        os.truncate(tmp_path / name, 100)
        for read in (lambda: source.take(np.array([N - 1])), lambda: source.read(Span(0, N))):
            with pytest.raises(ReadError, match=name):
                read()

    def test_a_file_that_is_removed_is_a_read_error(self, table: pa.Table, tmp_path: Path, name: str) -> None:
        source = TableSource(write(table, tmp_path / name), decoded_bytes=0)
        (tmp_path / name).unlink()
        with pytest.raises(ReadError, match=rf"{name}: No such file"):
            source.take(np.array([0]))

    def test_what_is_no_table_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"no table at all, but long enough to have a footer")
        with pytest.raises(SourceError, match=rf"{name} must be an? (Parquet|Arrow)"):
            TableSource(tmp_path / name)


TRUNCATED = """
import os, sys
import datasets
import numpy as np
import penstock as ps
from penstock.source.table.parts import FilePart

source = ps.TableSource(sys.argv[1])
assert source.take(np.array([0, 89_999]))["x"].tolist() == [0, 89_999]
FilePart.check = lambda self: None  # as if it were truncated between this and the copy
os.truncate(sys.argv[1], 4096)
try:
    source.take(np.array([0, 89_999]))
except ps.ReadError as error:
    print("truncated" in str(error))
"""


@pytest.mark.skipif(not is_compiled(), reason="only the C part survives the map of a truncated file")
def test_an_arrow_file_that_is_truncated_while_numbers_are_copied_is_a_read_error(tmp_path: Path) -> None:
    path = write(pa.table({"x": np.arange(90_000)}), tmp_path / "t.arrow")
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(path)], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_damage_names_the_file_and_the_row_group(table: pa.Table, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=100, write_page_checksum=True)
    begin = parquet.ParquetFile(path).metadata.row_group(3).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[begin + 60] ^= 4
    path.write_bytes(content)
    source = TableSource(path)
    assert source.read(Span(0, 300))["x"].tolist() == list(range(300))
    with pytest.raises(DamageError, match=r"a\.parquet: row group 3: "):
        source.take(np.array([301]))


@pytest.mark.parametrize("kind", ["memory", "parquet"])
def test_a_missing_integer_is_an_error_that_names_column_and_row(tmp_path: Path, kind: str) -> None:
    where: Any = pa.table({"n": pa.array([*range(150), None, 151])})
    if kind == "parquet":
        parquet.write_table(where, tmp_path / "a.parquet", row_group_size=100)
        where = tmp_path / "a.parquet"
    with pytest.raises((SourceError, ReadError), match=r"'n' must have a value in every row, but row 150 has none"):
        TableSource(where).read(Span(100, 152))
    assert TableSource(where, fill={"n": -7}).take(np.array([150, 151]))["n"].tolist() == [-7, 151]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: TableSource(t, ["xs"]), r"'xs'\. Did you mean 'x'\?"),
        (lambda t: TableSource(t, "x"), "columns must be a list of names"),
        (lambda t: TableSource(t, []), "columns must be a list of names"),
        (lambda t: TableSource(t.slice(0, 0)), "at least one row, got none in the Table"),
        (lambda t: TableSource(pa.table({})), "at least one"),
        (lambda t: TableSource(t, fill={"z": 1}), r"fill must be for columns that are read.*'z'"),
        (lambda t: TableSource(t, fill={"x": 0.5}), r"fill\['x'\] must be a value of int64, got 0.5"),
        (lambda t: TableSource(t, chunk_items=0), "chunk_items must be an integer >= 1"),
        (lambda t: TableSource(t, decoded_bytes=-1), "decoded_bytes must be an integer >= 0"),
        (lambda t: TableSource({"x": [1]}), "A table must be a path.*got dict"),
        (lambda t: TableSource(pl.LazyFrame({"x": [1]})), r"Call collect\(\) first"),
        (lambda t: TableSource(pd.DataFrame({"m": [1, "a"]})), r"values of one type.*column m"),
        (lambda t: TableSource(pd.DataFrame([[1, 2]], columns=["a", "a"])), r"a name of its own.*'a', 'a'"),
        (lambda t: TableSource(pa.table([[1], [2]], names=["a", "a"])), "several columns 'a'"),
        (lambda t: TableSource("s3://bucket/a.parquet"), "must be one of this machine, got the URL"),
        (lambda t: TableSource("no/such.parquet"), r"no/such\.parquet: No such file"),
        (lambda t: TableSource("no/such/*.parquet"), r"No file matches .*no/such/\*\.parquet"),
        (lambda t: TableSource("table.xlsx"), r"\.parquet.*, got .*table\.xlsx"),
    ],
)
def test_bad_input(table: pa.Table, call: Any, message: str) -> None:
    with pytest.raises((OptionError, ReadError), match=message):
        call(table)


def test_columns_that_differ_between_files_are_named(table: pa.Table, tmp_path: Path) -> None:
    write(table, tmp_path / "a.parquet")
    write(table.set_column(1, "y", [pa.array([str(n) for n in range(N)])]), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"column 'y' is float64 in .*a\.parquet and text in .*b\.parquet"):
        TableSource(tmp_path)
    assert len(TableSource(tmp_path, ["x"]).index) == 2 * N


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x,y\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("", "Empty CSV file"),
        ("x\n", "at least one row"),
        ("x,x\n1,2\n", "several columns 'x'"),
    ],
    ids=["ragged", "empty", "no rows", "names"],
)
def test_bad_csv_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(SourceError, match=rf"(?s)a\.csv.*{message}|{message}.*a\.csv"):
        TableSource(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("name,x\nMeier,1\nMüller,2\n", r"got b'M\\xfcller' in row 1 of column 'name'"),
        ("größe,x\n1,1\n", r"got b'\\xf6\\xdfe'"),
    ],
    ids=["value", "name"],
)
def test_a_csv_file_of_another_encoding_is_refused_unless_it_is_said(tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(SourceError, match=rf"a\.csv must be a table of text in utf-8, but {found}.*encoding='latin-1'"):
        TableSource(path)
    rows = TableSource(path, encoding="latin-1").take(np.arange(content.count("\n") - 1))
    assert next(iter(rows)) == content.partition(",")[0]
    if "name" in rows:
        assert rows["name"].tolist() == ["Meier", "Müller"]
    path.write_text(content, encoding="utf-16")
    assert list(TableSource(path, encoding="utf-16").fields) == list(rows)


def test_the_mark_of_an_encoding_at_the_begin_of_a_csv_file_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,n\nä,1\n", encoding="utf-8-sig")
    (tmp_path / "b.csv").write_text("name,n\nä,1\n", encoding="utf-16")
    with pytest.raises(SourceError, match=r"b\.csv .* begins as UTF-16 does. Use encoding='utf-16'"):
        TableSource(tmp_path / "b.csv")
    for source in (TableSource(tmp_path / "a.csv"), TableSource(tmp_path / "b.csv", encoding="utf-16")):
        found = source.take(np.array([0]))
        assert {name: column.tolist() for name, column in found.items()} == {"name": ["ä"], "n": [1]}


def test_an_encoding_is_one_of_csv_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(pa.table({"x": [1]}), path)
    with pytest.raises(OptionError, match=r"encoding is one of CSV files, got encoding='latin-1' for .*a\.parquet"):
        TableSource(path, encoding="latin-1")
    with pytest.raises(OptionError, match="for a Table"):
        TableSource(pa.table({"x": [1]}), encoding="latin-1")
    with pytest.raises(OptionError, match="encoding must be one that Python knows, such as 'latin-1', got 'latin-99'"):
        TableSource(tmp_path / "a.csv", encoding="latin-99")


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[table\]'"):
        TableSource("a.parquet")


def test_columns_that_arrow_can_only_slice_are_read(tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["a", "b", None], pa.string_view()),
        "bytes": pa.array([b"a", b"b", None], pa.binary_view()),
        "texts": pa.array([["a"], ["b", "c"], None], pa.list_(pa.string_view())),
        "runs": pa.RunEndEncodedArray.from_arrays([2, 3], [1.5, 2.5]),
    }
    table = pa.table(columns)
    feather.write_feather(table, tmp_path / "a.feather", compression="uncompressed")
    for source in (TableSource(table), TableSource(tmp_path / "a.feather")):
        found = source.take(np.array([2, 0]))
        assert {name: values.tolist() for name, values in found.items()} == {
            "text": [None, "a"],
            "bytes": [None, b"a"],
            "texts": [None, ["a"]],
            "runs": [2.5, 1.5],
        }


def test_dictionaries_of_views_are_read(tmp_path: Path) -> None:
    numbers = pa.array([0, 1, None, 1])
    texts = pa.DictionaryArray.from_arrays(numbers, pa.array(["a", "b"], pa.string_view()))
    payloads = pa.DictionaryArray.from_arrays(numbers, pa.array([b"a", b"b"], pa.binary_view()))
    table = pa.concat_tables([pa.table({"text": texts, "bytes": payloads})] * 2)
    feather.write_feather(table, tmp_path / "a.feather", compression="uncompressed")
    for source in (TableSource(table), TableSource(tmp_path / "a.feather")):
        found = source.take(np.array([7, 2, 0, 1]))
        assert found["text"].tolist() == ["b", None, "a", "b"]
        assert found["bytes"].tolist() == [b"b", None, b"a", b"b"]
        assert source.read(Span(1, 6))["text"].tolist() == ["b", None, "b", "a", "b"]
    assert len(TableSource(table).where("text == 'b'").index) == 4


def test_a_column_that_arrow_cannot_decode_is_named() -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([["a"], ["b"]], pa.list_(pa.string_view())))
    with pytest.raises(ReadError, match=r"Column 'word' must have a type that Arrow can decode, got dictionary<"):
        TableSource(pa.table({"word": words})).take(np.array([2, 0]))


def test_polars_columns_without_a_type_of_arrow_are_refused() -> None:
    objects = pl.DataFrame({"x": [1, 2], "thing": pl.Series([{1}, {2}], dtype=pl.Object)})
    with pytest.raises(SourceError, match=r"'thing' holds Python objects"):
        TableSource(objects)
    with pytest.raises(SourceError, match=r"Arrow must have the types of all columns, big Int128"):
        TableSource(pl.DataFrame({"big": pl.Series([1, 2], dtype=pl.Int128)}))


def test_what_was_set_on_a_hugging_face_dataset_and_is_not_applied_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    dataset = datasets.Dataset.from_dict({"a": [1, 2], "b": [3, 4]})
    TableSource(dataset)
    TableSource(dataset.with_format("torch"))
    assert not caplog.records
    TableSource(dataset.with_transform(dict))
    TableSource(dataset.with_format("torch", columns=["a"]))
    first, second = caplog.messages
    assert "transform" in first
    assert "columns" in second
