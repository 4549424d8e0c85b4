"""Windowed: stretches of rows of another source, which rows they hold, and that each row is read once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, SourceSuite

import penstock as ps
from penstock.convert import write_source
from penstock.core.types import Block, Span
from penstock.source import ArraySource, Renamed, Windowed, ZarrSource
from penstock.source.stored.zarr.array import ZarrArray

ROWS = np.arange(103 * 3, dtype=np.float32).reshape(103, 3)
TIMES = np.arange(103) * 10


def series(shift: int = 0) -> ArraySource:
    return ArraySource({"x": ROWS + shift, "time": TIMES})


class TestWindows(SourceSuite):
    @pytest.fixture(params=[(10, 10), (10, 4), (3, 7), (1, 1)], ids=str)
    def case(self, request: pytest.FixtureRequest) -> Case:
        length, stride = request.param

        def truth(item: int) -> dict[str, Any]:
            rows = slice(item * stride, item * stride + length)
            return {"x": ROWS[rows], "time": TIMES[rows]}

        n_items = (103 - length) // stride + 1
        return Case(
            lambda: Windowed(series(), length, stride), truth, n_items, lambda: Windowed(series(1), length, stride)
        )


class TestRenamedFields(SourceSuite):
    @pytest.fixture
    def case(self) -> Case:
        names = {"x": "voltage"}
        truth = lambda item: {"voltage": ROWS[item], "time": np.int64(TIMES[item])}  # noqa: E731
        return Case(lambda: Renamed(series(), names), truth, 103, lambda: Renamed(series(1), names))


class Counting(ArraySource):
    """Notes which rows are read."""

    rows: list[int]

    def read(self, span: Span, out: Block | None = None) -> Block:
        self.rows += range(span.start, span.stop)
        return super().read(span, out)

    def take(self, items: Any, out: Block | None = None) -> Block:
        self.rows += items.tolist()
        return super().take(items, out)


@given(
    length=st.integers(1, 30),
    stride=st.integers(1, 30),
    numbers=st.lists(st.integers(0, 10_000), min_size=1, max_size=12),
)
def test_each_row_is_read_once_and_no_other(length: int, stride: int, numbers: list[int]) -> None:
    source = Counting({"x": np.arange(103)})
    source.rows = []
    windows = Windowed(source, length, stride)
    items = np.array(numbers) % len(windows.index)
    wanted = [list(range(n * stride, n * stride + length)) for n in items.tolist()]
    assert windows.take(items)["x"].tolist() == wanted
    assert sorted(source.rows) == sorted({row for rows in wanted for row in rows})
    places = windows.places(items)
    pairs = zip(places["start_row"].tolist(), places["stop_row"].tolist(), strict=True)
    assert [list(range(*place)) for place in pairs] == wanted


def test_a_recording_is_trained_on_without_being_converted(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "lfp.zarr"), data=ROWS, chunks=(16, 3))
    source = Windowed(ZarrSource(tmp_path / "lfp.zarr"), 20, 10)
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=4, seed=1)
    with ps.Loader(source, plan, num_workers=2) as loader:
        starts = [int(window[0, 0]) // 3 for batch in loader for window in batch["data"].numpy()]
    assert sorted(starts) == list(range(0, 90, 10))
    both = ps.Concat([source, Windowed(ZarrSource(tmp_path / "lfp.zarr"), 20, 10)])
    assert len(both.index) == 18


def test_windows_are_written_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time,voltage\n" + "".join(f"{n},{n / 4}\n" for n in range(50)))
    table = ps.open(tmp_path / "trace.csv").fields("voltage").source
    found = ps.open(Windowed(table, 20, 10)).write(tmp_path / "shards", show_progress=False)
    assert found["total_samples"] == 4
    item = ps.TarSource(tmp_path / "shards").take(np.array([2]))
    assert item["voltage"][0].tolist() == [n / 4 for n in range(20, 40)]
    about = item["metadata"][0]
    assert (about["file"], about["start_row"], about["stop_row"]) == ("trace.csv", 20, 40)


def test_chunks_are_decoded_about_once_when_their_windows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.arange(40_000, dtype=np.float32).reshape(10_000, 4)
    zarr.create_array(str(tmp_path / "a.zarr"), data=rows, chunks=(2_000, 4))
    decoded = []
    plain = ZarrArray.tasks

    def tasks(self: Any, start: int, stop: int, *more: Any) -> Any:
        decoded.append(-(-stop // 2_000) - start // 2_000)
        return plain(self, start, stop, *more)

    monkeypatch.setattr(ZarrArray, "tasks", tasks)
    write_source(Windowed(ZarrSource(tmp_path / "a.zarr"), 8, 4), tmp_path / "out", show_progress=False)
    assert sum(decoded) < 20  # of 5, each also by the scan and by windows across borders
    source = ps.TarSource(tmp_path / "out")
    assert np.array_equal(source.take(np.array([2_000]))["data"][0], rows[8_000:8_008])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 0}, ps.OptionError, "length must be an integer >= 1"),
        ({"length": 5, "stride": 0}, ps.OptionError, "stride must be an integer >= 1"),
        ({"length": 104}, ps.SourceError, r"length must be at most 103, .* got 104"),
    ],
)
def test_windows_that_cannot_be_are_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Windowed(series(), **options)


def test_rows_that_vary_in_shape_are_refused_with_what_to_do() -> None:
    with pytest.raises(ps.SourceError, match=r"fixed shape, but '' .* varies\. Choose other fields"):
        Windowed(ps.DatasetSource([np.zeros(2), np.zeros(3)]), 2)
