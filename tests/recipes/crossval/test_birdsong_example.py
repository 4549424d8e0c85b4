"""The example of birdsong tells species apart whose authors it never heard, and says what it waited for."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from penstock_scripts import load_script


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/birdsong.py")


def test_the_example_learns_and_prints_its_results(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = example.main(["--quick", "--workers", "0", "--out", str(tmp_path / "out")])
    assert figures["accuracy"] > 0.4  # chance is 1 / 6; other processors round differently, so there is some room
    assert figures["recording_accuracy"] > 0.4
    assert 0 <= figures["waiting_share"] <= 1
    printed = capsys.readouterr().out
    assert "432 spectrograms of 1×48×61: 6 species, 12 authors who each recorded 3 of them" in printed
    assert "no author is on both sides" in printed
    assert "Chance is 17%" in printed
    assert "The training waited " in printed
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["mean_val_accuracy"] == figures["accuracy"]
    # A second run resumes from its checkpoints and prints the same.
    again = example.main(["--quick", "--workers", "0", "--out", str(tmp_path / "out")])
    assert again["accuracy"] == figures["accuracy"]


def test_the_birds_of_the_example_are_as_described(example: ModuleType) -> None:
    data = example.generate(4, seed=1)
    assert data["features"].shape == (4 * 3 * 3 * 4, 1, 48, 61)
    assert np.isfinite(data["features"]).all()
    for author in np.unique(data["authors"]):
        assert len(np.unique(data["labels"][data["authors"] == author])) == 3
    for recording in np.unique(data["recordings"]):
        assert len(np.unique(data["labels"][data["recordings"] == recording])) == 1
    assert np.array_equal(example.generate(4, seed=1)["features"], data["features"])
    assert not np.array_equal(example.generate(4, seed=2)["features"], data["features"])
