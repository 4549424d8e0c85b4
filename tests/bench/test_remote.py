"""Parts of the remote benchmark run with little data, and what they counted adds up."""

from pathlib import Path

import pytest

from bench.cold.loaders import Way
from bench.measure import alone
from bench.remote import epochs
from bench.remote.endpoint import serve
from tests.bench.parts_bench import LARGE, run_part, shrink

pytestmark = pytest.mark.timeout(600)  # each contender is a process that imports torch


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def test_an_epoch_is_streamed_beside_the_limit(tmp_path: Path) -> None:
    found = run_part("remote-stream", tmp_path)
    assert list(found) == ["remote stream large", "remote stream middle"]
    for limit, penstock in found.values():
        assert limit["name"] == "obstore, 16 requests in flight"
        assert (limit["ratio"], penstock["rate"] > 0) == (1.0, True)


def test_how_long_a_consumer_waits(tmp_path: Path) -> None:
    rows = run_part("remote-waiting", tmp_path)["remote waiting"]
    assert len(rows) == 2
    assert all(row["first_ms"] > 0 and 0 <= row["share"] <= 1 for row in rows)


def test_the_first_batch(tmp_path: Path) -> None:
    rows = run_part("remote-first", tmp_path)["remote first"]
    assert len(rows) == 4
    assert all(row["requests"] > 0 and row["round_trips"] > 0 for row in rows)


def test_epochs_with_a_cache(tmp_path: Path) -> None:
    with serve(tmp_path) as endpoint:
        place = epochs.Place(endpoint, LARGE.store(tmp_path), LARGE)
        found = alone(epochs.penstock_epochs, place, Way("windows", "2 threads"), 1.1, 100.0)
    assert found[0].downloaded > 0.5
    assert [epoch.downloaded for epoch in found[1:]] == [0.0, 0.0]
    assert found[2].items_per_s > 0
