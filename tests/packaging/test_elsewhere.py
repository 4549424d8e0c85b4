"""Systems that are not Linux: the same batches without anything that only Linux has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock_test_processes import HANG_SECONDS

HERE = Path(__file__).parent


def run(folder: Path, *, elsewhere: bool) -> dict[str, Any]:
    """Run the round; elsewhere: without what only Linux has, and without the C part."""
    folder.mkdir()
    environment = {**os.environ, "PENSTOCK_NATIVE": "0" if elsewhere else os.environ.get("PENSTOCK_NATIVE", "")}
    if elsewhere:
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text((HERE / "elsewhere.py").read_text())
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    (folder / "data").mkdir()
    done = subprocess.run(
        [sys.executable, str(HERE / "elsewhere_round.py"), str(folder / "data")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_batches_trainings_and_files_are_the_same_without_what_only_linux_has(tmp_path: Path) -> None:
    here, elsewhere = (run(tmp_path / str(each), elsewhere=each) for each in (False, True))
    assert (elsewhere.pop("native"), elsewhere.pop("memfd")) == (False, False)
    assert here.pop("memfd")
    here.pop("native")
    assert elsewhere == here
    for name in ("plain", "packed"):
        assert len({here[f"{name}, {run}"] for run in ("inline", "threads", "processes")}) == 1
