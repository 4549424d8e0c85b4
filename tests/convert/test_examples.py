"""The example scripts that convert, run as their pages say."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from penstock import TarSource

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_cluster_example_converts_on_this_machine_and_resumes(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(60.0).reshape(30, 2))
    command = [
        sys.executable, str(EXAMPLES / "convert_slurm.py"), str(tmp_path / "rows.npy"),
        "--output", str(tmp_path / "out"), "--queue", "local", "--jobs", "2", "--shard-size", "7",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "30 samples in 5 shards" in done.stdout
    assert TarSource(tmp_path / "out").take(np.arange(30))["data"].tolist() == np.arange(60.0).reshape(30, 2).tolist()
    alone = [*command, "--jobs", "1"]  # there is nothing to do for two
    again = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "out holds a dataset already" in again.stderr
    assert subprocess.run([*alone, "--resume"], capture_output=True, text=True, check=False).returncode == 0
