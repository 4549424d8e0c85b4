"""`penstock edit`: the options reach the edits, errors name options, and the help has what one needs to know."""

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
    return CliRunner().invoke(app, ["edit", *arguments])


def values(folder: Path, name: str) -> list[int]:
    source = TarSource(folder)
    found: list[int] = source.take(np.arange(len(source.index)))[name].tolist()
    return found


def test_all_options_together(folder: Path) -> None:
    words = "monday -o week --merge tuesday --where y!=1 --sort-by x --rename x=n --drop-field z --drop-field y"
    done = run(*words.split(), "--reshard", "5", "--workers", "2", "--validate")
    assert done.exit_code == 0, done.output
    assert values(folder / "week", "n") == [n for n in range(20) if n % 10 % 3 != 1]
    assert "14 items in 3 shards" in done.stdout
    assert "Edited 2 datasets" in done.stdout
    assert "no problems" in done.stdout
    done = run("week", "-o", "parts", "--split", "a=0.5,b=0.5", "--seed", "7", "--reshard", "100kB", "--json")
    assert {name: part["total_samples"] for name, part in json.loads(done.stdout).items()} == {"a": 7, "b": 7}
    parts = TarSource("week").split(a=0.5, b=0.5, seed=7)
    assert values(folder / "parts" / "a", "n") == parts["a"].columns("n")["n"].tolist()


def test_a_field_is_added(folder: Path) -> None:
    (folder / "features_of_days.py").write_text("def double(item):\n    return 2 * item['x']\n")
    done = run("monday", "-o", "more", "--add-field", "twice=features_of_days:double")
    assert done.exit_code == 0, done.output
    assert values(folder / "more", "twice") == [2 * n for n in range(10)]


BAD = {
    "monday": (2, "--output"),
    "monday -o out --add-field x": (2, "--add-field must be NAME=MODULE:FUNCTION"),
    "monday -o out --merge monday": (2, "twice"),
    "monday -o out --drop-field x --drop-field y --drop-field z": (2, "must leave at least one field"),
    "monday -o out --rename zz=a": (2, "Did you mean 'z'?"),
    "monday -o out --add-field v=math:sqrt": (1, "math:sqrt failed at item 0"),
    "monday -o monday --overwrite": (2, "--output must be outside of the dataset that is read"),
    "monday -o tuesday": (1, "Replace it with --overwrite"),
    "monday -o out --where y>7": (2, "--where 'y>7' keeps none of 10 items"),
    "monday -o out --where w>7": (2, "has no column 'w'"),
    "monday -o out --drop-field zz": (2, "Did you mean 'z'?"),
    "monday -o out --rename x": (2, "--rename must be OLD=NEW"),
    "monday -o out --reshard 0": (2, "--reshard must be a number of items >= 1"),
    "monday -o out --reshard many": (2, "must be a size such as 100GB"),
    "monday -o out --split-by y": (2, "--split-by needs a split"),
    "monda -o out": (2, "Did you mean monday?"),
}


@pytest.mark.parametrize("words", BAD)
def test_errors_name_options_and_what_to_do(words: str, folder: Path) -> None:
    done = run(*words.split())
    assert (done.exit_code, BAD[words][1] in done.output) == (BAD[words][0], True), done.output
    assert not (folder / "out").exists()


def test_the_help_teaches() -> None:
    done = run("--help")
    for text in ("does not", "change", "--where", "subject == 'A'", "--reshard N|SIZE", "--resume", "Examples:"):
        assert text in done.stdout
