"""The chunk streaming example trains, reports its waiting time, and gives the same model twice."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from penstock_scripts import load_script
from penstock_test_parts import own_threads

TINY = ["--neurons", "30", "--stimuli", "5", "--timesteps", "5000", "--chunk-size", "1000", "--batch-size", "100"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/fly_latent.py")


def test_it_learns_and_says_whether_the_training_waited(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "--device", "cpu", "--folder", str(tmp_path / "sim"), "--trace", str(tmp_path / "trace.json")]
    before, *after = example.main(options)
    assert after[-1] < 0.5 * before
    printed = capsys.readouterr().out
    # 4500 steps to train on, in chunks of 1000: 45 batches of 100 are 4 chunks of 10, and a rest.
    assert "4 chunks of 10 batches: 40 batches in an epoch" in printed
    assert "Waiting for chunks: " in printed
    assert "Chunks: 8, wait mean " in printed
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"disk_load", "gpu_queue_wait", "train"} <= names
    assert own_threads() == []
    assert example.main(options) == [before, *after]  # of the simulation that is there


def test_it_explains_itself(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    assert "--chunk-size" in capsys.readouterr().out
