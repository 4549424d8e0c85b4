"""TableSource: every kind of table gives the rows that were put into it."""

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from penstock_source_suite import Case, ShortSuite, SourceSuite
from pyarrow import feather, parquet

from penstock import Loader, Plan, Sequential, Span, TableSource

N = 23


def truth(item: int, offset: int = 0) -> dict[str, Any]:
    """Return an item in which every value tells its number."""
    number = item + offset
    return {
        "x": np.int64(number),
        "half": np.float16(number / 4),
        "flag": np.bool_(number % 3 == 0),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) + number,
        "when": np.datetime64(1_000_000 + number, "us"),
        "day": np.datetime64(number, "D"),
        "gap": np.float64(np.nan if item % 5 == 2 else number),
        "tokens": np.arange(number, number + item % 4, dtype=np.int32),
        "text": f"row {number}",
        "kind": "even" if number % 2 == 0 else "odd",
        "raw": bytes([number]),
    }


def arrow_table(offset: int = 0) -> pa.Table:
    rows = [truth(item, offset) for item in range(N)]
    matrix = pa.list_(pa.list_(pa.float32(), 3), 2)
    columns = {
        "matrix": pa.array([row["matrix"].tolist() for row in rows], matrix),
        "gap": pa.array([None if np.isnan(row["gap"]) else row["gap"] for row in rows], pa.float64()),
        "tokens": pa.array([row["tokens"].tolist() for row in rows], pa.list_(pa.int32())),
        "kind": pa.array([row["kind"] for row in rows]).dictionary_encode(),
        "day": pa.array([row["day"].astype(object) for row in rows], pa.date32()),
    }
    return pa.table({name: columns[name] if name in columns else [row[name] for row in rows] for name in rows[0]})


def write(folder: Path, kind: str, offset: int) -> Any:
    """Return what TableSource is given."""
    path = folder / f"{kind} {offset}"
    if kind != "table" and path.exists():
        return {"parquet": path, "feather": path / "a.feather", "lz4": str(path / "*.feather")}[kind]
    path.mkdir(exist_ok=True)
    table = arrow_table(offset)
    if kind == "parquet":  # two files, of row groups of 5
        parquet.write_table(table.slice(0, 13), path / "a.parquet", row_group_size=5)
        parquet.write_table(table.slice(13), path / "b.parquet", row_group_size=5)
        return path
    if kind == "feather":
        feather.write_feather(table, path / "a.feather", compression="uncompressed", chunksize=6)
        return path / "a.feather"
    if kind == "lz4":
        feather.write_feather(table.slice(0, 9), path / "a.feather", compression="lz4", chunksize=4)
        feather.write_feather(table.slice(9), path / "b.feather", compression="uncompressed", chunksize=4)
        return str(path / "*.feather")
    assert kind == "table"
    return pa.concat_tables([table.slice(0, 4), table.slice(4, 1), table.slice(5)])


class TestTables(ShortSuite):
    @pytest.fixture(params=["parquet", "feather", "lz4", "table"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        def make(offset: int) -> TableSource:
            return TableSource(write(tmp_path, request.param, offset))

        return Case(partial(make, 0), truth, N, partial(make, 1))


class TestNumbersOfAMappedFile(SourceSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        names = ["x", "half", "flag", "matrix", "when"]

        def make(offset: int) -> TableSource:
            return TableSource(write(tmp_path, "feather", offset), names, chunk_items=4)

        return Case(partial(make, 0), lambda item: {name: truth(item)[name] for name in names}, N, partial(make, 1))


class TestDatasetsOfHuggingFace(ShortSuite):
    ORDER = np.random.default_rng(0).permutation(N).tolist()

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        datasets.disable_progress_bars()

        def make(offset: int) -> TableSource:
            folder = tmp_path / f"hf {offset}"
            if not folder.exists():
                features = datasets.Features(
                    {
                        "x": datasets.Value("int64"),
                        "text": datasets.Value("string"),
                        "pair": datasets.Sequence(datasets.Value("float32"), length=2),
                        "image": datasets.Array2D((2, 3), "uint8"),
                        "label": datasets.ClassLabel(names=["no", "yes"]),
                    }
                )
                rows = [self.truth(item, offset) for item in range(N)]
                columns = {name: [row[name] for row in rows] for name in features}
                datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder, num_shards=2)
            return TableSource(datasets.load_from_disk(folder).select(self.ORDER))

        return Case(partial(make, 0), lambda item: self.truth(self.ORDER[item]), N, partial(make, 1))

    @staticmethod
    def truth(item: int, offset: int = 0) -> dict[str, Any]:
        number = item + offset
        return {
            "x": np.int64(number),
            "text": f"row {number}",
            "pair": np.array([number, number + 0.5], np.float32),
            "image": np.arange(6, dtype=np.uint8).reshape(2, 3) + np.uint8(number),
            "label": np.int64(number % 2),
        }


class TestWhatTablesAreGivenAs:
    def test_the_files_of_a_dataset_are_mapped_not_copied(self, tmp_path: Path) -> None:
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"x": np.arange(100_000)}).save_to_disk(tmp_path / "hf")
        before = pa.total_allocated_bytes()
        source = TableSource(datasets.load_from_disk(tmp_path / "hf"))
        assert source.take(np.array([99_999, 7]))["x"].tolist() == [99_999, 7]
        assert pa.total_allocated_bytes() - before < 100_000

    @pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame], ids=["pandas", "polars"])
    def test_frames(self, make: Callable[[Any], Any]) -> None:
        frame = make({"x": np.arange(N), "y": np.arange(N) / 8, "name": [f"n{item}" for item in range(N)]})
        block = TableSource(frame).take(np.array([22, 3]))
        assert (block["x"].tolist(), block["y"].tolist(), block["name"].tolist()) == (
            [22, 3],
            [2.75, 0.375],
            ["n22", "n3"],
        )

    def test_arrow_streams(self, tmp_path: Path) -> None:
        table = arrow_table()
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        block = TableSource([tmp_path / "a.arrow"]).take(np.array([22, 7]))
        assert (block["x"].tolist(), block["text"].tolist()) == ([22, 7], ["row 22", "row 7"])

    def test_csv_files_of_a_folder_in_the_order_of_their_names(self, tmp_path: Path) -> None:
        (tmp_path / "b.csv").write_text("x;name\n2;c\n3;\n")
        (tmp_path / "a.csv").write_text("x;name\n0;a\n1;b\n")
        (tmp_path / "readme.txt").write_text("no table")
        block = TableSource(tmp_path).read(Span(0, 4))
        assert (block["x"].tolist(), block["name"].tolist()) == ([0, 1, 2, 3], ["a", "b", "c", ""])

    def test_the_row_numbers_of_pandas_are_left_out(self, tmp_path: Path) -> None:
        pd.DataFrame({"x": [1, 2, 3]}).iloc[[2, 0]].to_parquet(tmp_path / "a.parquet")
        assert list(TableSource(tmp_path / "a.parquet").fields) == ["x"]

    def test_other_values_are_objects(self) -> None:
        rows = {"struct": [{"a": 1}, {"a": 2}], "money": [Decimal("1.5"), None], "words": [["a"], ["b", "c"]]}
        block = TableSource(pa.table(rows)).take(np.array([1, 0]))
        assert {name: list(values) for name, values in block.items()} == {
            name: values[::-1] for name, values in rows.items()
        }

    def test_columns_and_with_fields_read_some_columns_in_their_order(self, tmp_path: Path) -> None:
        source = TableSource(write(tmp_path, "parquet", 0), ["text", "x", "flag"])
        assert list(source.fields) == ["text", "x", "flag"]
        few = source.with_fields(["flag", "text"])
        assert few.index.digest == source.index.digest
        assert {name: a.tolist() for name, a in few.take(np.array([4, 3])).items()} == {
            "flag": [False, True],
            "text": ["row 4", "row 3"],
        }

    def test_rows_are_chosen_by_columns_that_are_not_read(self, tmp_path: Path) -> None:
        chosen = TableSource(write(tmp_path, "parquet", 0), ["x"]).where("kind == 'odd' and x > 18")
        assert {name: a.tolist() for name, a in chosen.read(Span(0, 2)).items()} == {"x": [19, 21]}

    def test_chunks_are_row_groups(self, tmp_path: Path) -> None:
        index = TableSource(write(tmp_path, "parquet", 0)).index
        assert index.chunk_sizes(np.arange(index.n_chunks)).tolist() == [5, 5, 3, 5, 5]

    def test_where_files_lie_does_not_matter_for_the_identity(self, tmp_path: Path) -> None:
        first = write(tmp_path, "parquet", 0)
        second = first.rename(tmp_path / "elsewhere")
        again = TableSource(second).index.digest
        assert TableSource([second / "a.parquet", second / "b.parquet"]).index.digest == again
        assert TableSource([second / "b.parquet", second / "a.parquet"]).index.digest != again

    def test_batches_are_tensors_and_lists(self) -> None:
        when = [dt.datetime(2026, 1, 1 + n, tzinfo=dt.UTC) for n in range(2)]
        source = TableSource(pa.table({"x": [1.5, 2.5], "t": ["a", "b"], "l": [[1], [2, 3]], "when": when}))
        with Loader(source, Plan(source.index, Sequential(), batch_size=2)) as loader:
            (batch,) = loader
        assert batch["x"].tolist() == [1.5, 2.5]
        assert batch["t"] == ["a", "b"]
        assert [each.tolist() for each in batch["l"]] == [[1], [2, 3]]
        assert batch["when"] == [np.datetime64("2026-01-01"), np.datetime64("2026-01-02")]


class TestMissingValues:
    TABLE = pa.table(
        {
            "n": pa.array([0, None, 2], pa.int16()),
            "pair": pa.array([[0, 1], [2, 3], None], pa.list_(pa.int64(), 2)),
            "point": pa.array([[0.0, 1.0], None, [4.0, None]], pa.list_(pa.float32(), 2)),
            "list": pa.array([[1], None, [2]]),
            "text": ["a", None, "c"],
            "when": pa.array([0, None, 2], pa.timestamp("s")),
        }
    )

    @pytest.mark.parametrize("kind", ["memory", "parquet"])
    def test_nan_nat_none_and_what_is_filled(self, tmp_path: Path, kind: str) -> None:
        parquet.write_table(self.TABLE, tmp_path / "a.parquet")
        where = self.TABLE if kind == "memory" else tmp_path / "a.parquet"
        block = TableSource(where, fill={"n": -1, "pair": 9}).take(np.array([2, 1, 0]))
        assert (block["n"].dtype, block["n"].tolist()) == (np.int16, [2, -1, 0])
        assert block["pair"].tolist() == [[9, 9], [2, 3], [0, 1]]
        np.testing.assert_array_equal(block["point"], np.array([[4, np.nan], [np.nan, np.nan], [0, 1]], np.float32))
        assert [each if each is None else each.tolist() for each in block["list"]] == [[2], None, [1]]
        assert block["text"].tolist() == ["c", None, "a"]
        assert np.isnat(block["when"]).tolist() == [False, True, False]
