"""A process that edits a dataset is killed: nothing is published, and resuming ends in the same bytes."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
from penstock_convert_parts import tree, visible
from penstock_test_killer import start_killer

from penstock.convert import Edits, edit_dataset
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from penstock.source.combine import Zip
from penstock.source.tar.source import TarSource


def write(folder: Path, numbers: range) -> Path:
    writer = ShardWriter(folder, WriteOptions(4))
    for number in numbers:
        writer.write({"x": np.arange(3) + 10 * number}, f"id-{number}", {"rank": number * 5 % 7})
    writer.commit()
    return folder


SCRIPT = """
from penstock_test_killer import serve
from penstock.convert import Edits, edit_dataset

def run(sources, output, edits, resume):
    edit_dataset(sources, output, Edits(**edits), resume=resume, show_progress=False)

serve(run)
"""


def test_a_sidecar_that_is_killed_anywhere_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    dataset = write(tmp_path / "first", range(9))
    before, edits = tree(dataset), {"add_fields": {"total": "penstock_convert_parts:add_up"}}
    with start_killer(SCRIPT) as killer:
        ticks = killer.run(sources=[str(dataset)], output=str(tmp_path / "whole"), edits=edits, resume=False)["count"]
        whole = tree(tmp_path / "whole")
        for at in range(1, ticks + 1, max(1, ticks // 6)):
            out = tmp_path / f"out{at}"
            job: dict[str, Any] = {"sources": [str(dataset)], "output": str(out), "edits": edits}
            assert killer.run(at=at, resume=False, **job)["killed"] == signal.SIGKILL
            if at < ticks // 2:
                assert visible(out) == set()
            killer.run(resume=True, **job)
            assert tree(out) == whole, f"killed at {at} of {ticks}"
            assert tree(dataset) == before
    both = Zip([TarSource(dataset, fields=["x"]), TarSource(tmp_path / "whole", fields=["total"])])
    block = both.take(np.array([8, 0, 3]))
    assert block["total"].tolist() == block["x"].sum(axis=1).tolist() == [243, 3, 93]


def test_killed_anywhere_resuming_ends_in_the_same_bytes(tmp_path: Path) -> None:
    datasets = [write(tmp_path / "first", range(9)), write(tmp_path / "second", range(9, 16))]
    edits: dict[str, Any] = {
        "where": "rank > 1",
        "sort_by": "rank",
        "split": {"a": 0.5, "b": 0.5},
        "rename": {"x": "z"},
    }
    job: dict[str, Any] = {"sources": list(map(str, datasets)), "edits": edits}
    with start_killer(SCRIPT) as killer:
        ticks = killer.run(output=str(tmp_path / "whole"), resume=False, **job)["count"]
        whole = tree(tmp_path / "whole")
        for at in range(1, ticks + 1, ticks // 6):
            out = tmp_path / f"out{at}"
            answer = killer.run(at=at, output=str(out), resume=False, **job)
            assert answer["killed"] == signal.SIGKILL
            if at < ticks // 2:
                assert visible(out) == set()
            killer.run(output=str(out), resume=True, **job)
            assert tree(out) == whole, f"killed at {at} of {ticks}"
    edit_dataset(datasets, tmp_path / "workers", Edits(**edits), workers=2, show_progress=False)
    assert tree(tmp_path / "workers") == whole
