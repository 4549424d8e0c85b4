"""The whole examination, with its other process: `penstock inspect` as a person and as a program sees it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli import app
from penstock.core.errors import SourceError
from penstock.observe import examine
from penstock.observe.check.probe import run_probe
from tests.observe.check.look import tree

ROOT = Path(__file__).parents[3]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    ps.create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(20)}, shard_size=5)
    return tmp_path / "shards"


def test_json_is_one_document_whose_keys_are_documented(shards: Path) -> None:
    before = tree(shards)
    found, machine = (
        json.loads(CliRunner().invoke(app, words).stdout)
        for words in (["check", str(shards), "--json"], ["inspect", "--json"])
    )
    assert tree(shards) == before
    assert list(found) == list(machine) == ["penstock", "where", "worst", "counts", "findings"]
    assert (found["where"], machine["where"]) == (str(shards), None)
    assert found["counts"]["problem"] == 0
    text = (ROOT / "docs" / "reference" / "cli.md").read_text().split("### Findings")[1].split("\n## ")[0]
    assert all(f"`{key}`" in text for key in (*found, *found["findings"][0]))
    folder = ROOT / "src" / "penstock" / "observe" / "check"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    names = set(re.findall(r'"((?:installation|machine|storage|data)\.\w+)"', source))
    assert {finding["name"] for finding in [*found["findings"], *machine["findings"]]} <= names
    assert names == set(re.findall(r"^\| `((?:installation|machine|storage|data)\.\w+)` \|", text, re.M))
    answers = next(entry for entry in machine["findings"] if entry["name"] == "machine.start_methods")["facts"]
    assert sorted(answers["seconds"]) == ["fork", "forkserver", "spawn"]


def test_a_problem_is_printed_with_what_to_do_and_the_code_is_1(shards: Path) -> None:
    (shards / "shard_000001.tar").unlink()
    done = CliRunner().invoke(app, ["check", str(shards), "--quiet"])
    assert done.exit_code == 1
    assert re.search(r"^  problem  1 shard of 4: shard_000001\.tar is missing\.$", done.stdout, re.M)
    assert f"           $ penstock check {shards} --all\n" in done.stdout
    assert "\n1 problem" in done.stdout
    assert re.findall(r"^(\w+)$", done.stdout, re.M) == ["Data"]


def test_a_path_that_does_not_exist_is_2_and_named(shards: Path) -> None:
    done = CliRunner().invoke(app, ["check", f"{shards}s"])
    assert done.exit_code == 2
    assert "No such file or folder" in done.stderr
    assert f"Did you mean {shards}?" in done.stderr
    with pytest.raises(SourceError, match="No such file or folder"):
        examine(f"{shards}s")


def test_a_probe_that_hangs_or_dies_is_ended_and_what_it_answered_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_package.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "dying_package.py").write_text(f"import os\nos.kill(os.getpid(), {signal.SIGSEGV:d})\n")
    (tmp_path / "broken_package.py").write_text("raise ImportError('no library')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    dead = run_probe(["broken_package", "dying_package"], lambda *_: None)
    assert dead["imports"] == {"broken_package": "ImportError: no library"}
    assert dead["ended"].startswith("exit code -11")
    assert sorted(dead["start_methods"]) == ["fork", "forkserver", "spawn"]
    began = time.monotonic()
    late = run_probe(["hanging_package"], lambda *_: None, seconds=8)
    assert late["ended"] == "no answer within 8 s"
    assert time.monotonic() - began < 60
