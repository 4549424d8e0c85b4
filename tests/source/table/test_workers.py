"""TableSource in worker processes, forked after Arrow has used its threads or spawned, and in threads."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from penstock import Loader, Plan, RunOptions, Span, TableSource, WindowShuffle

N = 240


@pytest.fixture(params=["parquet", "feather", "memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> TableSource:
    rows = range(N)
    table = pa.table({"x": list(rows), "text": [f"row {n}" for n in rows], "many": [[n] * (n % 3) for n in rows]})
    if request.param == "memory":
        return TableSource(table, chunk_items=16)
    path = tmp_path / f"a.{request.param}"
    if request.param == "parquet":
        parquet.write_table(table, path, row_group_size=16)
    else:
        feather.write_feather(table, path, compression="uncompressed", chunksize=16)
    return TableSource(path, chunk_items=16)


@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_batches_are_those_of_the_plan(source: TableSource, method: Any) -> None:
    options = RunOptions(executor="processes" if method else "threads", start_method=method)
    source.read(Span(0, N))  # what Arrow has opened and started in this process must not matter in another
    plan = Plan(source.index, WindowShuffle(4), batch_size=9, seed=3, tail="short")
    wanted = [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    with Loader(source, plan, num_workers=2, options=options) as loader:
        found: list[dict[str, Any]] = list(loader)
    assert [batch["x"].tolist() for batch in found] == wanted
    assert [batch["text"] for batch in found] == [[f"row {item}" for item in items] for items in wanted]
    assert [[each.tolist() for each in batch["many"]] for batch in found] == [
        [[item] * (item % 3) for item in items] for items in wanted
    ]
