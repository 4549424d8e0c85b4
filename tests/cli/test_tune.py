"""`penstock tune`: a table, a verdict, a file, and errors without tracebacks."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import Loader, Plan, Sequential, create_shards_from_arrays
from penstock.cli import app
from penstock.files.machine import this_machine
from penstock.observe import Tuning
from penstock.observe.tuning import Setting, Trial
from penstock.source.find_source import open_source

RUN = CliRunner()


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune") / "rows.npy"
    np.save(path, np.arange(4000).reshape(1000, 4))
    return path


def test_it_prints_every_setting_and_what_to_set_and_writes_a_file_that_a_loader_takes(array: Path) -> None:
    output = array.parent / "tuned.json"
    done = RUN.invoke(app, ["tune", str(array), "--budget", "0.2", "--batch-size", "8", "-o", str(output)])
    assert done.exit_code == 0, done.output
    tuned = Tuning.load(output)
    for trial in tuned.trials:
        assert str(trial.setting) in done.output
    assert tuned.verdict in done.output
    source = open_source(str(array))
    with Loader(source, Plan(source.index, Sequential(), 8), **tuned.loader_kwargs()) as loader:
        assert [row[0] for row in next(iter(loader))["rows"].tolist()] == [4 * number for number in range(8)]


def test_json_is_what_was_found(array: Path) -> None:
    done = RUN.invoke(app, ["tune", str(array), "--budget", "0.1", "--max-workers", "0", "--step-ms", "2", "--json"])
    found = json.loads(done.stdout)
    assert [trial["executor"] for trial in found["trials"]] == ["inline"]
    assert found["step_seconds"] == 0.002
    assert found["batch_items"] == 32


def test_the_settings_of_a_file_are_plain_json_that_a_loader_takes(array: Path) -> None:
    setting = Setting.of("threads", 2, 4)
    trials = (Trial(Setting.of("inline"), 1.0, 0.0), Trial(setting, 0.1, 0.1))
    found = Tuning(trials, 8, 64, None, this_machine()).to_dict()["loader"]
    assert json.loads(json.dumps(found)) == {"num_workers": 2, "options": {"executor": "threads", "prefetch": 4}}
    with ps.open(str(array)).batch(8).loader(**found) as loader:
        assert (loader.options.executor, loader.options.prefetch) == ("threads", 4)


def test_shards_are_tuned_too(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(40)}, shard_size=20)
    done = RUN.invoke(app, ["tune", str(tmp_path / "shards"), "--budget", "0.1", "--max-workers", "0"])
    assert done.exit_code == 0, done.output
    assert "Set num_workers=0" in done.output


def test_a_missing_or_invalid_path_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.npy").write_bytes(b"no npy")
    for where, said in (
        ("nowhere", "nowhere"),
        ("nowhere.npy", "No such file or folder: "),
        ("broken.npy", "must be a .npy file"),
    ):
        done = RUN.invoke(app, ["tune", str(tmp_path / where)])
        assert done.exit_code == 2
        assert said in done.output
        assert "Traceback" not in done.output
