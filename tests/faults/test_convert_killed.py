"""Processes of a conversion are killed: its workers, or their parent. No work is lost, no process stays."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock_cases import some_cases
from penstock_convert_parts import Taped, has_happened, held, mend, mishap, read, rows, tapes, tree, visible
from penstock_test_killer import Killer, start_killer
from penstock_test_parts import eventually
from penstock_test_processes import session_members

from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.core.errors import WorkerError, WriteError
from penstock.shard.outputs.write_options import WriteOptions

HALVES = (("train", 0.5), ("val", 0.5))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compression": "gz"},
    "by time": {"split": [HALVES, "time"]},
    "by subject": {"split": [HALVES, "subject"]},
}

SCRIPT = """
import sys
from pathlib import Path
from penstock_convert_parts import Taped
from penstock_test_killer import serve
from penstock.convert.engines import LocalEngine
from penstock.convert.convert import convert
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.shard.outputs.write_options import WriteOptions

def options_of(split=None, compression="none", **others):
    sides = Split() if split is None else Split(tuple(map(tuple, split[0])), split[1])
    return ConvertOptions(WriteOptions(4, compression=compression), sides, **others)

def run(inputs, output, options, workers, how):
    convert([Taped(Path(path)) for path in inputs], output, options_of(**options), engine=LocalEngine(workers), **how)

assert "torch" not in sys.modules
serve(run)
"""


class Conversions:
    """Runs conversions, one at a time, each in a process of its own."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer
        self.answer = killer.answer

    def begin(self, inputs: list[Taped], output: Path, case: str, *, at: int = 0, workers: int = 1, **how: str) -> int:
        """Start a conversion and return its process id."""
        paths = [str(given.path) for given in inputs]
        job: dict[str, Any] = {
            "inputs": paths,
            "output": str(output),
            "options": CASES[case],
            "workers": workers,
            "how": how,
        }
        return self._killer.begin(at=at, **job)

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.begin(*args, **kwargs)
        return self.answer()


@pytest.fixture(scope="module")
def conversions() -> Iterator[Conversions]:
    with start_killer(SCRIPT) as killer:
        yield Conversions(killer)


def options_of(case: str) -> ConvertOptions:
    others = dict(CASES[case])
    split, compression = others.pop("split", None), others.pop("compression", "none")
    sides = Split() if split is None else Split(*split)
    return ConvertOptions(WriteOptions(4, compression=compression), sides, **others)


@pytest.fixture
def inputs(tmp_path: Path) -> list[Taped]:
    return tapes(tmp_path / "in", (4, 6, 4), ("anna_1", "bert_1", "anna_2"))


# -- the process that started it ---------------------------------------------------------------------------------------


HOW = {
    "kill -9": (os.kill, signal.SIGKILL),
    "SIGTERM": (os.kill, signal.SIGTERM),
    "SIGTERM to all, as Slurm does": (os.killpg, signal.SIGTERM),
}


@some_cases(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ["plain"])
def test_workers_of_a_process_that_is_killed_end_and_keep_nobody_out(
    case: str, how: str, conversions: Conversions, inputs: list[Taped], tmp_path: Path
) -> None:
    send, sent = HOW[how]
    convert(inputs, tmp_path / "whole", options_of(case))
    mishap(inputs[1], "hold", 3)
    parent = conversions.begin(inputs, tmp_path / "out", case, workers=2)
    assert eventually(lambda: held(inputs[1].path))
    assert eventually(lambda: len(session_members(parent)) == 3), "the process and its two workers"
    with pytest.raises(WriteError, match="Another writer is at work"):
        convert(inputs, tmp_path / "out", options_of(case), existing="resume")
    send(parent, sent)
    try:
        assert eventually(lambda: session_members(parent) == []), "a worker has outlived its parent"
    finally:
        mend(inputs[1])
    assert conversions.answer()["killed"] == sent
    assert visible(tmp_path / "out") == set()
    convert(inputs, tmp_path / "out", options_of(case), engine=LocalEngine(2), existing="resume")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_ctrl_c_ends_the_workers_and_leaves_what_was_finished(
    conversions: Conversions, inputs: list[Taped], tmp_path: Path
) -> None:
    mishap(inputs[2], "hold", 3)
    parent = conversions.begin(inputs, tmp_path / "out", "plain", workers=2)
    assert eventually(lambda: held(inputs[2].path))
    os.killpg(parent, signal.SIGINT)  # as a terminal does: the workers get it as well
    try:
        assert eventually(lambda: session_members(parent) == [])
    finally:
        mend(inputs[2])
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        conversions.answer()
    assert visible(tmp_path / "out") == set()
    convert(inputs, tmp_path / "out", options_of("plain"), existing="resume")
    assert read(tmp_path / "out") == rows(inputs)


# -- a worker ----------------------------------------------------------------------------------------------------------


@some_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_a_worker_that_is_killed_costs_nothing(case: str, inputs: list[Taped], tmp_path: Path) -> None:
    convert(inputs, tmp_path / "whole", options_of(case))
    mishap(inputs[0], "die", 3)
    mishap(inputs[1], "die", 5)
    convert(inputs, tmp_path / "out", options_of(case), engine=LocalEngine(2))
    assert has_happened(inputs[0])
    assert has_happened(inputs[1])
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("case", ["plain", "by subject"])
def test_an_input_that_always_kills_workers_is_named_and_nothing_is_published(
    case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    convert(inputs, tmp_path / "whole", options_of(case))
    mishap(inputs[1], "die", 5, once=False)
    with pytest.raises(WorkerError, match=r"died 3 times while working on shard_.*\.tar, made from .*bert_1\.npy"):
        convert(inputs, tmp_path / "out", options_of(case), engine=LocalEngine(2))
    assert visible(tmp_path / "out") == set()
    mend(inputs[1])
    convert(inputs, tmp_path / "out", options_of(case), engine=LocalEngine(2), existing="resume")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_an_input_that_kills_workers_when_it_is_scanned_is_named(inputs: list[Taped], tmp_path: Path) -> None:
    mishap(inputs[1], "die", 0, once=False)
    with pytest.raises(WorkerError, match=r"died 3 times while working on Taped\(.*bert_1\.npy"):
        convert(inputs, tmp_path / "out", engine=LocalEngine(2))
    assert not (tmp_path / "out").exists()
