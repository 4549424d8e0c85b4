"""`penstock convert`: the options reach the edits, errors name options, and the help has what one needs to know."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock import TarSource, convert_to_shards
from penstock.cli import app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number, name in enumerate(("monday", "tuesday")):
        np.savez(f"{name}.npz", x=np.arange(10) + 10 * number, y=np.arange(10) % 3, z=np.zeros((10, 300)) + number)
        convert_to_shards(f"{name}.npz", name, show_progress=False)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments])


def values(folder: Path, name: str) -> list[int]:
    source = TarSource(folder)
    found: list[int] = source.take(np.arange(len(source.index)))[name].tolist()
    return found


def test_all_options_together(folder: Path) -> None:
    words = "monday tuesday -o week --where y!=1 --sort-by x --rename x=n --drop-fields z,y"
    done = run(*words.split(), "--shard-size", "5", "--workers", "2", "--validate")
    assert done.exit_code == 0, done.output
    assert values(folder / "week", "n") == [n for n in range(20) if n % 10 % 3 != 1]
    assert "14 items in 3 shards" in done.stdout
    assert "Converted 2 of 2 inputs" in done.stdout
    assert "no problems" in done.stdout
    words = "week -o parts --where n>=0 --split a=0.5,b=0.5 --seed 7 --shard-size 100kB --json"
    done = run(*words.split())
    assert {name: part["total_samples"] for name, part in json.loads(done.stdout).items()} == {"a": 7, "b": 7}
    parts = TarSource("week").split(a=0.5, b=0.5, seed=7)
    assert values(folder / "parts" / "a", "n") == parts["a"].columns("n")["n"].tolist()


def test_a_field_is_added_to_the_others(folder: Path) -> None:
    (folder / "features_of_days.py").write_text("def double(item):\n    return 2 * item['x']\n")
    done = run("monday", "-o", "out", "--add-field", "twice=features_of_days:double")
    assert done.exit_code == 0, done.output
    assert values(folder / "out", "twice") == [2 * n for n in values(folder / "out", "x")]


BAD = {
    "monday": (2, "Missing option '--output'"),
    "monday -o out --add-field x": (2, "--add-field must be NAME=VALUE"),
    "monday -o out --add-field v=math:sqrt": (1, "math:sqrt failed at item 0"),
    "monday monday -o out --where y>0": (2, "twice"),
    "monday -o out --drop-fields x,y,z": (2, "must leave at least one field"),
    "monday -o out --rename zz=a": (2, "Did you mean 'z'?"),
    "monday -o monday --overwrite --where y>0": (2, "must be outside of the dataset that is read"),
    "monday -o tuesday --where y>0": (1, "Replace it with --overwrite"),
    "monday -o out --where y>7": (2, "--where 'y>7' keeps none of 10 items"),
    "monday -o out --where w>7": (2, "has no column 'w'"),
    "monday -o out --drop-fields zz": (2, "Did you mean 'z'?"),
    "monday -o out --rename x": (2, "rename must be NAME=VALUE"),
    "monday -o out --where y>0 --shard-size 0": (2, "must be an integer >= 1"),
    "monday -o out --where y>0 --shard-size many": (2, "must be a size such as 100GB"),
    "monda -o out": (2, "Did you mean monday?"),
}


@pytest.mark.parametrize("words", BAD)
def test_errors_name_options_and_what_to_do(words: str, folder: Path) -> None:
    done = run(*words.split())
    assert (done.exit_code, BAD[words][1] in done.output) == (BAD[words][0], True), done.output
    assert not (folder / "out").exists()


def test_the_help_teaches() -> None:
    done = run("--help")
    for text in ("Shards:", "--where", "subject == 'A'", "--shard-size N|SIZE", "--resume", "Examples:"):
        assert text in done.stdout
