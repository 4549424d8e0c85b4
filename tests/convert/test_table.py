"""Tables: which values the cells of CSV, TSV and Parquet files become, and what is refused."""

import datetime as dt
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.convert.table import read_table
from penstock.core.errors import ReadError, SourceError


def test_columns_are_integers_numbers_or_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'file,age,weight,code,note\na.wav,31,2.5,007,"a, ""b"""\nb.wav,,1e3,12,\n\nc.wav,-4,nan,3,x\n'
    )
    assert read_table(tmp_path / "a.csv") == {
        "file": ["a.wav", "b.wav", "c.wav"],
        "age": [31, None, -4],
        "weight": [2.5, 1000.0, None],
        "code": ["007", "12", "3"],
        "note": ['a, "b"', None, "x"],
    }


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ";"), ("a.tsv", "\t"), ("a.CSV", ","), ("b.csv", "\t")])
def test_other_delimiters_line_ends_and_byte_order_marks_are_read(tmp_path: Path, name: str, mark: str) -> None:
    lines = [mark.join(row) for row in (["file", "word"], ["a b", "ä"], ["c", "e"])]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read_table(tmp_path / name) == {"file": ["a b", "c"], "word": ["ä", "e"]}


def test_the_row_numbers_of_pandas_are_left_out(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"file": ["a", "b"], "x": [1.5, 2]}).to_csv(tmp_path / "a.csv")
    assert read_table(tmp_path / "a.csv") == {"file": ["a", "b"], "x": [1.5, 2.0]}


def test_parquet_gives_the_same_columns(tmp_path: Path) -> None:
    day = dt.date(2026, 11, 17)
    columns = {"file": ["a", "b"], "age": [31, None], "weight": [2.5, float("nan")], "day": [day, None]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = read_table(tmp_path / "a.parquet")
    assert found == {"file": ["a", "b"], "age": [31, None], "weight": [2.5, None], "day": ["2026-11-17", None]}
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(SourceError, match=r"b\.parquet as a Parquet table"):
        read_table(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a line of column names and at least one row"),
        ("a.csv", b"file,word\n", "at least one row"),
        ("a.csv", b"file,word\na\n", "row 2 of .* has 1 and the first 2"),
        ("a.csv", b"file,file\na,b\n", "several columns 'file'"),
        ("a.csv", b"file,\na,b\n", "a column without a name"),
        ("a.csv", b"file\n\xff\xfe\n", "text in UTF-8"),
        ("a.csv", b'file\n"a\n', "not a valid table"),
        ("a.xlsx", b"PK", r"must be a \.csv, \.tsv or \.parquet file"),
    ],
)
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_table(tmp_path / name)
    assert name in str(caught.value)
    with pytest.raises(ReadError, match=r"none\.csv"):
        read_table(tmp_path / "none.csv")
