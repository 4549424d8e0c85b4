"""The rows of a table are those of pandas, bit for bit, whatever its columns and however it is stored."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock import Span, TableSource

_NUMBERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "?", "M8[ms]", "M8[ns]", "m8[us]"]
_COUNT = itertools.count()


@st.composite
def frames(draw: st.DrawFn) -> pd.DataFrame:
    n_rows = draw(st.integers(1, 30))
    columns: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from([*_NUMBERS, "text", "category", "lists", "bytes"]))
        if kind in _NUMBERS:
            elements: Any = None
            if kind.startswith(("M8", "m8")):
                elements = st.integers(-(2**60), 2**60).map(lambda n, kind=kind: np.int64(n).view(kind))
            columns[f"c.{number}"] = draw(npst.arrays(kind, n_rows, elements=elements))
        elif kind == "lists":
            columns[f"c.{number}"] = draw(
                st.lists(npst.arrays("f4", st.integers(0, 3)), min_size=n_rows, max_size=n_rows)
            )
        else:
            one = st.binary(max_size=4) if kind == "bytes" else st.text("aé0\n,", max_size=4)
            values = draw(st.lists(one if kind == "category" else st.none() | one, min_size=n_rows, max_size=n_rows))
            series = pd.Series(values, dtype="category" if kind == "category" else object)
            columns[f"c.{number}"] = series
    return pd.DataFrame(columns)


def check(found: Any, wanted: pd.Series) -> None:
    for row, (value, expected) in enumerate(zip(found, wanted, strict=True)):
        if found.dtype != object:
            raw = wanted.to_numpy()
            assert found.dtype == raw.dtype
            exact = value.tobytes() == raw[row].tobytes()
            assert exact or (np.isnan(value) and np.isnan(raw[row]))  # a NaN is stored as a missing value
        elif isinstance(expected, np.ndarray):
            assert value.dtype == expected.dtype
            assert value.tobytes() == expected.tobytes() or np.array_equal(value, expected, equal_nan=True)
        else:
            assert value == expected or (value is None and pd.isna(expected))


@given(frame=frames(), data=st.data())
def test_rows_equal_those_of_pandas(tmp_path_factory: pytest.TempPathFactory, frame: pd.DataFrame, data: Any) -> None:
    kind = data.draw(st.sampled_from(["parquet", "feather", "lz4", "frame"]))
    path = tmp_path_factory.getbasetemp() / f"law {next(_COUNT)}"
    where: Any = write(frame, kind, path, data.draw(st.integers(1, len(frame))))
    source = TableSource(where, decoded_bytes=data.draw(st.sampled_from([0, 100, 1 << 20])))
    items = data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=10))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(frame))] * 2)))
    for block, rows in (
        (source.take(np.array(items, np.int64)), items),
        (source.read(Span(start, stop)), range(start, stop)),
    ):
        assert list(block) == list(frame)
        for name, found in block.items():
            check(found, frame[name].iloc[list(rows)])
    source.close()


def write(frame: pd.DataFrame, kind: str, path: Path, rows: int) -> Any:
    if kind == "parquet":
        frame.to_parquet(path.with_suffix(".parquet"), row_group_size=rows)
        return path.with_suffix(".parquet")
    if kind == "frame":
        return frame
    compression = "uncompressed" if kind == "feather" else "lz4"
    frame.to_feather(path.with_suffix(".feather"), compression=compression, chunksize=rows)
    return path.with_suffix(".feather")
