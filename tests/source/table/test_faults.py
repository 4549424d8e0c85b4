"""What is wrong with a table is said by name: at once where that is known, else when it is read."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from penstock import DamageError, MissingDependency, OptionError, ReadError, SourceError, Span, TableSource

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


def missing_integer(folder: Path, kind: str) -> Any:
    table = pa.table({"n": pa.array([*range(150), None, 151])})
    if kind == "memory":
        return table
    parquet.write_table(table, folder / "a.parquet", row_group_size=100, write_statistics=kind == "parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize("kind", ["memory", "parquet", "without statistics"])
def test_a_missing_integer_is_an_error_that_names_column_and_row(tmp_path: Path, kind: str) -> None:
    where = missing_integer(tmp_path, kind)
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


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[table\]'"):
        TableSource("a.parquet")
