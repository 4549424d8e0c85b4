"""A disk that is full, limited or read-only: a clear error, nothing published, nothing lost.

Small file systems (tmpfs) are mounted in a process of its own that has a namespace of its own for mounts.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_convert_parts import tree, visible
from penstock_test_parts import run_isolated

from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.core.errors import WriteError
from penstock.shard.outputs.write_options import WriteOptions

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

SCRIPT = '''
import json, subprocess, sys
from pathlib import Path
import numpy as np
sys.path.append(sys.argv[2])
from penstock_convert_parts import tree, visible
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.engines import LocalEngine
from penstock.convert.scan import ConvertOptions
from penstock.convert.convert import convert
from penstock.convert.splits import Split
from penstock.core.errors import PenstockError
from penstock.shard.outputs.write_options import WriteOptions

FOLDER, DISK = Path(sys.argv[1]), Path(sys.argv[1]) / "disk"
INPUTS = [NpyInput(path) for path in sorted(FOLDER.glob("*.npy"))]
SPLIT = Split((("train", 0.5), ("val", 0.5)))
PLAIN = ConvertOptions(WriteOptions(10))
OPTIONS = {
    "plain": PLAIN,
    "split": ConvertOptions(WriteOptions(10), SPLIT),
}

def mount(what):
    subprocess.run(["mount", "-t", "tmpfs", "-o", what, "tmpfs", str(DISK)], check=True)

def remount(what):
    subprocess.run(["mount", "-o", "remount," + what, str(DISK)], check=True)

def attempt(case, out=DISK / "out", **how):
    try:
        convert(INPUTS, out, OPTIONS[case], engine=LocalEngine(how.pop("workers", 1)), **how)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "done"

def try_twice(case, small, large, workers=1):
    """Return the result on a small disk, whether all or nothing was visible, and the result of resuming."""
    subprocess.run(["umount", str(DISK)], check=True)
    mount(small)
    answer = attempt(case, workers=workers)
    seen = visible(DISK / "out")
    remount(large)
    again = attempt(case, existing="resume" if (DISK / "out").exists() else "refuse")
    right = seen == (set(whole) if answer == "done" else set())
    return [answer, right, again, tree(DISK / "out") == whole]
'''


def in_namespace(folder: Path, body: str) -> Any:
    """Run a script that may mount file systems on `folder/disk`, and return the JSON that it prints."""
    probe = subprocess.run(
        [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip(f"no namespaces for mounts here: {probe.stderr.strip()}")
    (folder / "disk").mkdir()
    path = folder / "script.py"
    path.write_text(SCRIPT + body)
    parts = str(Path(__file__).parents[1] / "parts")
    command = [*NAMESPACE, sys.executable, "-W", "error", str(path), str(folder), parts]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def inputs(tmp_path: Path) -> list[NpyInput]:
    """Three files, of which row r of file k is full of 100 k + r."""
    found = []
    for number in range(3):
        path = tmp_path / f"tape_{number}.npy"
        np.save(path, np.full((20, 200), 100 * number, np.float32) + np.arange(20, dtype=np.float32)[:, None])
        found.append(NpyInput(path))
    return found


def on_small_disks(folder: Path, case: str, attempts: str) -> list[str]:
    """Return the result of each of several attempts to convert, the last of which had enough space.

    Whatever came of one: all or nothing was there, and with more room it went on to the bytes of a large disk.
    """
    body = f"""
case = {case!r}
mount("size=64m")
assert attempt(case) == "done"
whole, answers = tree(DISK / "out"), []
{attempts}
print(json.dumps(answers))
"""
    answers = in_namespace(folder, body)
    assert {tuple(rest) for _, *rest in answers} == {(True, "done", True)}
    assert answers[-1][0] == "done"
    return [answer for answer, *_ in answers]


@pytest.mark.parametrize("case", ["plain", "split"])
def test_a_full_disk_publishes_nothing_and_with_more_room_it_goes_on(
    case: str, inputs: list[NpyInput], tmp_path: Path
) -> None:
    attempts = """
for kilobytes in range(8, 420, 51):
    answers.append(try_twice(case, f"size={kilobytes}k", "size=64m", workers=1 + kilobytes // 51 % 2))
"""
    failed = [answer for answer in on_small_disks(tmp_path, case, attempts) if answer != "done"]
    assert len(failed) > 3
    assert all(answer.startswith("WriteError") and "No space left on device" in answer for answer in failed), failed


@pytest.mark.parametrize("case", ["plain", "split"])
def test_a_disk_that_takes_no_more_files_publishes_all_or_nothing(
    case: str, inputs: list[NpyInput], tmp_path: Path
) -> None:
    # Each file and folder is an inode: with one more each time, another one cannot be made.
    attempts = """
for inodes in range(2, 80, 3):
    answers.append(try_twice(case, f"size=64m,nr_inodes={inodes}", "nr_inodes=1000"))
    if answers[-1][0] == "done":
        break
"""
    answers = on_small_disks(tmp_path, case, attempts)
    assert all(answer.startswith("WriteError") for answer in answers[:-1]), answers
    assert len(answers) > 4


def test_a_full_disk_leaves_the_old_dataset_as_it_is(inputs: list[NpyInput], tmp_path: Path) -> None:
    body = """
mount("size=220k")
INPUTS, ALL = INPUTS[:1], INPUTS
assert attempt("plain") == "done"
before = tree(DISK / "out")
INPUTS = ALL
answer = attempt("plain", existing="overwrite")
kept = {name: content for name, content in tree(DISK / "out").items() if not name.startswith(".")} == before
remount("size=64m")
again = attempt("plain", existing="resume")
assert attempt("plain", FOLDER / "whole") == "done"
print(json.dumps([answer, kept, again, tree(DISK / "out") == tree(FOLDER / "whole")]))
"""
    answer, *rest = in_namespace(tmp_path, body)
    assert answer.startswith("WriteError")
    assert "No space left on device" in answer
    assert rest == [True, "done", True]


def test_a_read_only_folder_is_named_and_stays_as_it_is(inputs: list[NpyInput], tmp_path: Path) -> None:
    body = """
mount("size=64m")
(DISK / "empty").mkdir()
assert attempt("plain") == "done"
before = tree(DISK)
remount("ro")
answers = [attempt(case, DISK / place, **how) for case in OPTIONS for place, how in (
    ("new", {}), ("empty", {}), ("out", {"existing": "overwrite"}))]
finished = attempt("plain", existing="resume")
print(json.dumps([answers, finished, tree(DISK) == before]))
"""
    answers, finished, same = in_namespace(tmp_path, body)
    for answer in answers:
        assert answer.startswith("WriteError")
        assert "Read-only file system" in answer
        assert str(tmp_path / "disk") in answer
    assert finished == "done", "there is nothing to write"
    assert same


@pytest.mark.parametrize("workers", [1, 2])
def test_a_limit_on_the_size_of_files_publishes_nothing(workers: int, inputs: list[NpyInput], tmp_path: Path) -> None:
    options = ConvertOptions(WriteOptions(10), Split((("train", 0.5), ("val", 0.5))))
    convert(inputs, tmp_path / "whole", options)
    for limit in (100, 7_000):
        message = run_isolated(_run_limited, inputs, tmp_path / f"out{limit}", options, workers, limit)
        assert "File too large" in message
        assert visible(tmp_path / f"out{limit}") == set()
        convert(inputs, tmp_path / f"out{limit}", options, existing="resume")
        assert tree(tmp_path / f"out{limit}") == tree(tmp_path / "whole")


def _run_limited(inputs: list[NpyInput], out: Path, options: ConvertOptions, workers: int, limit: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        convert(inputs, out, options, engine=LocalEngine(workers))
    except WriteError as error:
        return str(error)
    return "done"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(inputs: list[NpyInput], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    with pytest.raises(WriteError, match=r"out.*Permission denied"):
        convert(inputs, tmp_path / "out")
