"""Scalars of a watch in real MLflow and Weights & Biases, which have many dependencies: an environment of their own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from penstock_tree import find_python
from penstock_watch_scalars import NAMES

_PYTHON = find_python("loggers")
_ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    _PYTHON is None, reason="needs an environment with mlflow and wandb: make .venv-loggers/.ready"
)

_WATCH = """
    import json, sys
    import torch
    import penstock as ps

    def train(log):
        with ps.watch([torch.zeros(8, 2)] * 7, log=log, log_every_steps=3, warmup=0, show=False) as watched:
            for _ in watched:
                pass
"""


def run(code: str, folder: Path) -> dict[str, dict[str, float]]:
    """Run code in an interpreter that has the loggers; return what it prints last: values by step."""
    assert _PYTHON is not None
    (packages,) = _PYTHON.parents[1].glob("lib/python*/site-packages")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{packages}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_WATCH) + textwrap.dedent(code), str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def check(rows: dict[str, dict[str, float]]) -> None:
    """Check the values of each step: of seven batches of eight items, each of 64 bytes."""
    assert list(rows) == ["3", "6", "7"]
    for row in rows.values():
        assert set(row) == NAMES
        assert 0 < row["data/wait_fraction"] < 1
        assert row["data/items_per_second"] == pytest.approx(8 * row["data/batches_per_second"])
        assert row["data/mb_per_second"] == pytest.approx(64e-6 * row["data/batches_per_second"])
        assert row["data/warnings"] == 0


def test_the_active_run_of_mlflow_has_the_scalars(tmp_path: Path) -> None:
    code = """
        import mlflow
        mlflow.set_tracking_uri("file:" + sys.argv[1] + "/runs")
        with mlflow.start_run() as run:
            train(mlflow)
        client, rows = mlflow.MlflowClient(), {}
        for name in client.get_run(run.info.run_id).data.metrics:
            for each in client.get_metric_history(run.info.run_id, name):
                rows.setdefault(each.step, {})[name] = each.value
        print(json.dumps(dict(sorted(rows.items()))))
    """
    check(run(code, tmp_path))


def test_an_offline_run_of_wandb_has_the_scalars_on_an_axis_of_their_own(tmp_path: Path) -> None:
    # W&B has no function to read its file: a line of its own, and then records with their checksum, length and kind.
    code = """
        import struct
        from pathlib import Path
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record
        with wandb.init(project="tests", dir=sys.argv[1]) as run:
            train(run)
        wandb.teardown()  # its process writes the rest of the file
        [path] = Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")
        data, at, rows, axes = path.read_bytes(), 7, {}, {}
        assert data[:4] == b":W&B" and len(data) < 32768
        while at < len(data):
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            record = Record.FromString(data[at + 7 : at + 7 + length])
            at += 7 + length
            if record.HasField("metric"):
                axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            if record.HasField("history"):
                row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                row = {name: value for name, value in row.items() if name.startswith("data/")}
                rows[row.pop("data/batch")] = row
        assert axes == {"data/batch": "", "data/*": "data/batch"}, axes
        print(json.dumps(rows))
    """
    check(run(code, tmp_path))
