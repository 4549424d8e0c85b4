"""A process that writes a chosen source is killed: nothing is published, and resuming ends in the same bytes."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
from penstock_convert_parts import tree, visible
from penstock_test_killer import start_killer

from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from penstock.source.tar.source import TarSource


def write(folder: Path, numbers: range) -> Path:
    writer = ShardWriter(folder, WriteOptions(4))
    for number in numbers:
        writer.write({"x": np.arange(3) + 10 * number}, f"id-{number}", {"rank": number * 5 % 7})
    writer.commit()
    return folder


SCRIPT = """
from penstock_test_killer import serve
from penstock.convert import write_source
from penstock.convert.add_field import AddField
from penstock.source.combine import Concat
from penstock.source.tar.source import TarSource

def run(sources, output, resume, workers=1):
    parts = Concat([TarSource(path) for path in sources]).where("rank > 1").split(a=0.5, b=0.5)
    parts = {name: part.sort_by("rank") for name, part in parts.items()}
    transform = AddField("total", "penstock_convert_parts:add_up")
    write_source(parts, output, transform=transform, resume=resume, workers=workers, show_progress=False)

serve(run)
"""


def test_killed_anywhere_resuming_ends_in_the_same_bytes(tmp_path: Path) -> None:
    datasets = [write(tmp_path / "first", range(9)), write(tmp_path / "second", range(9, 16))]
    job: dict[str, Any] = {"sources": list(map(str, datasets))}
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
        killer.run(output=str(tmp_path / "workers"), resume=False, workers=2, **job)
        assert tree(tmp_path / "workers") == whole
    block = TarSource(tmp_path / "whole" / "a").take(np.arange(3))
    assert block["total"].tolist() == block["x"].sum(axis=1).tolist()
