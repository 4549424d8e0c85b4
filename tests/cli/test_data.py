"""`penstock index`, `inspect` and `verify`: what they print for people and for scripts, and what all commands share."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import soundfile
import typer
from PIL import Image
from typer.testing import CliRunner

from penstock import create_shards_from_arrays
from penstock.cli import app
from penstock.cli.errors import EXIT_CODES
from penstock.cli.options import EXAMPLES
from penstock.recipes.webdataset import ShardedDatasetInfo
from tests.shard.samples import archive

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty items in shards of 5; value = 10 x item + column, and one value is NaN."""
    folder = tmp_path_factory.mktemp("written") / "shards"
    values = 10.0 * np.arange(20)[:, None] + np.arange(3)
    values[7, 1] = np.nan
    create_shards_from_arrays(folder, {"x": values, "label": np.arange(20)}, shard_size=5)
    return folder


@pytest.fixture
def shards(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(written, tmp_path / "shards"))


@pytest.fixture
def damaged(shards: Path) -> Path:
    """A dataset with one changed byte in item 12."""
    shard = shards / "shard_000002.tar"
    content = bytearray(shard.read_bytes())
    at = content.index(np.array([120.0, 121.0, 122.0]).tobytes())
    content[at] ^= 1
    shard.write_bytes(content)
    return shards


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_healthy_dataset_is_a_line_and_a_document(shards: Path) -> None:
    done = run("check", "shards", "--all", "-q")
    size = sum(path.stat().st_size for path in shards.glob("*.tar"))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"20 items in 4 shards, {size / 1e6:.1f} MB: no problems\n"
    assert json.loads(run("check", "shards", "--all", "--json", "--quiet").stdout) == {
        "folder": str(shards),
        "total_samples": 20,
        "total_shards": 4,
        "total_bytes": size,
        "fields": ["x", "label", "metadata"],
        "fingerprint": ShardedDatasetInfo(shards).manifest.fingerprint,
        "healthy": True,
        "problems": [],
    }


def test_damage_is_listed_with_shard_and_item_and_the_code_is_1(damaged: Path) -> None:
    reason = "the checksum of 'x.npy' does not match its bytes"
    done = run("check", "shards", "--all", "-q")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"shard_000002.tar, item 12: {reason}\n1 problem\n"
    done = run("check", "shards", "--all", "-q", "--json")
    assert (done.exit_code, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["healthy"] is False
    assert found["problems"] == [{"shard": "shard_000002.tar", "item": 12, "reason": reason}]


def test_a_damaged_manifest_is_1_and_one_that_is_not_there_is_2(shards: Path) -> None:
    manifest = shards / "dataset_metadata.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    assert run("check", "shards", "--all").exit_code == 1
    manifest.unlink()
    assert run("check", "shards", "--all").exit_code == 2


def test_inspect_as_json_has_the_item_that_was_asked_for(shards: Path) -> None:
    found = json.loads(run("inspect", "shards", "--json", "--item", "13").stdout)
    item = found.pop("item")
    assert found == json.loads(run("inspect", "shards", "--json").stdout)
    assert ShardedDatasetInfo(shards).get_summary().items() <= found.items()
    assert item["number"] == 13
    assert item["fields"]["x"] == {"dtype": "float64", "shape": [3], "min": 130.0, "max": 132.0, "mean": 131.0}
    assert item["fields"]["label"] == {"dtype": "int64", "shape": [], "value": 13}


def test_json_has_no_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "shards", {"x": np.array([[1, np.inf]])})
    done = run("inspect", str(tmp_path / "shards"), "--json", "--item", "0")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert found["item"]["fields"]["x"]["mean"] is None


def test_inspect_plots_and_says_so_in_words_and_in_json(shards: Path) -> None:
    assert run("inspect", "shards", "--item", "3", "--png", "a.png").stdout.endswith("\nPlotted to a.png\n")
    assert json.loads(run("inspect", "shards", "--png", "b.png", "--json").stdout)["drawn_into"] == "b.png"
    assert all((shards.parent / name).read_bytes()[:4] == b"\x89PNG" for name in ("a.png", "b.png"))


def test_an_item_past_the_end_is_refused_before_anything_is_printed(shards: Path) -> None:
    done = run("inspect", "shards", "--item", "20")
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", "Error: --item must be 0–19, got 20.\n")


def test_an_item_past_the_end_is_a_sentence(shards: Path) -> None:
    done = run("inspect", "shards", "--item", "20", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["message"] == "--item must be 0–19, got 20."


def without_index(shards: Path) -> None:
    for path in shards.iterdir():
        if path.suffix != ".tar":
            path.unlink()


def test_index_says_what_it_found_or_that_nothing_was_written(shards: Path) -> None:
    without_index(shards)
    bad = shards / "shard_000001.tar"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:700])
    done = run("index", "shards", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["written"] is False
    assert {problem["shard"] for problem in found["problems"]} == {"shard_000001.tar"}
    assert not (shards / "dataset_metadata.json").exists()
    bad.write_bytes(whole)
    found = json.loads(run("index", "shards", "--json", "-w", "1").stdout)
    assert (found["written"], found["total_samples"], found["total_shards"], found["problems"]) == (True, 20, 4, [])
    assert run("check", "shards", "--all").exit_code == 0
    assert run("index", "shards").stdout.startswith("20 items in 4 shards: ")


def test_an_index_names_hidden_files_and_an_item_shows_sounds_and_archives_of_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wav, npz = io.BytesIO(), io.BytesIO()
    np.savez(npz, a=np.arange(3, dtype=np.float32))
    soundfile.write(wav, np.arange(8, dtype=np.int16), 8000, format="WAV")
    (tmp_path / "a.tar").write_bytes(
        archive([("1.wav", wav.getvalue()), ("1.npz", npz.getvalue()), ("._1.wav", b"x"), ("._1.npz", b"x")])
    )
    done = run("index", "a.tar", "-q")
    assert (done.stdout, done.stderr) == (
        "1 item in 1 shard: wav, npz\n",
        "a.tar: 2 hidden files were skipped: '._1.wav', '._1.npz'\n",
    )
    reason = "2 hidden files were skipped: '._1.wav', '._1.npz'"
    found = json.loads(run("index", "a.tar", "-q", "--json").stdout)
    assert found["skipped"] == [{"shard": "a.tar", "item": None, "reason": reason}]
    item = json.loads(run("inspect", "a.tar", "--item", "0", "--json").stdout)["item"]
    assert item["fields"]["wav"]["value"] == [{"dtype": "torch.float32", "shape": [1, 8]}, {"value": 8000}]
    assert item["fields"]["npz"]["value"] == {"a": "[0. 1. 2.]"}
    assert re.search(r"^  wav +torch\.float32 \(1, 8\); 8000$", run("inspect", "a.tar").stdout, re.MULTILINE)


def test_a_validated_conversion_as_json_is_one_document(shards: Path) -> None:
    np.save("rows.npy", np.arange(6))
    done = run(
        "convert",
        "rows.npy",
        "-o",
        "out",
        "--json",
        "--validate",
        "--quiet",
        "--split",
        "a=0.5,b=0.5",
        "--group-by",
        "time",
    )
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {name: (part["total_samples"], part["problems"]) for name, part in found.items()} == {
        "a": (3, []),
        "b": (3, []),
    }


def test_every_command_has_json_and_options_mean_the_same_everywhere() -> None:
    letters: dict[str, set[str]] = {}
    for name, command in COMMANDS.items():
        options = {option: parameter for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name
        for parameter in command.params:
            for letter in parameter.opts:
                if re.fullmatch("-[a-z]", letter):
                    letters.setdefault(letter, set()).add(max(parameter.opts, key=len))
    assert {letter: len(meanings) for letter, meanings in letters.items()} == dict.fromkeys(letters, 1)
    assert {"-o": {"--output"}, "-w": {"--workers"}, "-q": {"--quiet"}}.items() <= letters.items()


def test_every_example_of_the_help_has_options_that_exist() -> None:
    assert set(EXAMPLES) >= set(COMMANDS)
    for name, command in COMMANDS.items():
        known = {option for parameter in command.params for option in parameter.opts}
        for line in EXAMPLES[name]:
            assert line.startswith(f"penstock {name}")
            assert set(re.findall(r" (--?[a-z][a-z-]*)", line.partition("|")[0])) <= known, line
        assert all(line in run(name, "--help").stdout for line in EXAMPLES[name])


def test_exit_codes_are_in_the_help_and_in_one_table_of_the_reference() -> None:
    words = " ".join(run("--help").stdout.split())
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in words
        assert f"| {code} | {meaning}" in page


def test_help_names_the_commands_in_the_order_in_which_they_are_used() -> None:
    text = run("--help").stdout
    named = re.findall(r"^  (\w+)  ", text.partition("Commands:")[2], re.M)
    assert named == ["convert", "index", "inspect", "check", "tune"] == list(COMMANDS)


def complete(words: str, shell: str) -> str:
    """Return the completions of `words` that the program gives to a shell."""
    environment = {
        "_PENSTOCK_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    return CliRunner().invoke(app, [], prog_name="penstock", env=environment).stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shells_complete_commands_options_and_choices(shell: str) -> None:
    shown = complete("penstock che", shell)
    assert re.findall(r"\w+", shown.partition(":((")[2] or shown)[0] == "check"
    assert "--workers" in complete("penstock check --w", shell)
    formats = complete("penstock convert --format n", shell)
    assert set(re.findall(r"\b(nwb|npz|npy|zarr|audio)\b", formats)) == {"nwb", "npz", "npy"}


def test_zsh_completes_paths_with_files() -> None:
    assert complete("penstock check ", "zsh").strip() == "_files"


def test_bash_completes_with_the_script_that_is_shown(shards: Path) -> None:
    """End to end: bash reads the script, asks the program, and gets the completions; none means files."""
    penstock = Path(sys.executable).with_name("penstock")
    code = f"""
    eval "$(_PENSTOCK_COMPLETE=source_bash {penstock})"
    ask() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _penstock_completion {penstock}; echo "${{COMPREPLY[@]}}"; }}
    ask penstock convert --compression b
    complete -p penstock
    """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == [
        "bz2",
        "complete -o default -F _penstock_completion penstock",
    ]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command on a terminal of 100 columns, and return what appears there."""

    def shown(*arguments: str, **environment: str) -> str:
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **environment}.items():
            monkeypatch.setenv(name, value)
        leader, follower = os.openpty()
        with os.fdopen(follower, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            with pytest.raises(SystemExit):
                app(list(arguments))
        text = b""
        with contextlib.suppress(OSError):  # the end, on Linux
            while content := os.read(leader, 100_000):
                text += content
        os.close(leader)
        return text.decode().replace("\r\n", "\n")

    monkeypatch.delenv("NO_COLOR", raising=False)
    return shown


def rows(text: str) -> list[list[str]]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [re.split(r"\s{2,}", line.strip()) for line in plain.splitlines() if line.strip(" ─")]


def test_a_terminal_shows_tables(damaged: Path, screen: Any) -> None:
    text = screen("check", "shards", "--all")
    assert "\x1b[1m" in text
    assert rows(text) == [
        ["Shard", "Item", "Problem"],
        ["shard_000002.tar", "12", "the checksum of 'x.npy' does not match its bytes"],
        ["1 problem"],
    ]
    found = rows(screen("inspect", "shards", "--item", "13"))
    assert ["Items", "20 in 4 shards of up to 5"] in found
    assert ["x", ".npy", "float64", "(3,)", "float64 (3,), 130 to 132, mean 131"] in found


def test_no_color_means_no_colours_and_a_dumb_terminal_plain_text(shards: Path, screen: Any) -> None:
    text = screen("check", "shards", "--all", NO_COLOR="1")
    assert rows(text) == [["20 items in 4 shards, 0.1 MB: no problems"]]
    assert "\x1b" not in text
    assert screen("check", "shards", "--all", TERM="dumb") == run("check", "shards", "--all").stdout


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path, screen: Any) -> None:
    folder = tmp_path / "[red]x[/red]"
    create_shards_from_arrays(folder, {"a": np.arange(2)}, shard_size=2)
    assert ["Dataset", str(folder)] in rows(screen("inspect", str(folder), COLUMNS="300"))


# -- what is read where it is ------------------------------------------------------------------------------------------


def make_sources(folder: Path) -> None:
    """Tables, an HDF5 file and a folder of images; the value of an item is its number."""
    frame = pd.DataFrame({"number": np.arange(6), "text": [f"row {number}" for number in range(6)]})
    frame.to_csv(folder / "rows.csv", index=False)
    frame.to_parquet(folder / "rows.parquet")
    (folder / "tables").mkdir()
    frame.to_parquet(folder / "tables" / "rows.parquet")
    with h5py.File(folder / "day.h5", "w") as file:
        file["group/number"] = np.arange(6)
    for number in range(6):
        path = folder / "images" / f"class{number % 2}" / f"{number // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("rows.csv", "  number  int64 4"),
        ("rows.parquet", "  number  int64 4"),
        ("tables", "  number  int64 4"),
        ("day.h5/group/number", "  data  int64 4"),
        ("images", "  image  uint8 (4, 4, 3), 3 to 3, mean 3"),
        ("images/class0/*.png", "  image  uint8 (4, 4, 3), 4 to 4, mean 4"),
    ],
)
def test_the_commands_open_what_is_read_where_it_is(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_sources(tmp_path)
    item = 2 if "*" in where else 4
    found = run("inspect", where, "--item", str(item))
    assert found.exit_code == 0, found.stderr
    assert line in found.stdout.splitlines()
    n_items = 3 if "*" in where else 6
    assert found.stdout.startswith(f"{where}: {n_items} items, read where they are by penstock.open({where!r})")
    answer = json.loads(run("inspect", where, "--json").stdout)
    assert answer["total_samples"] == n_items
    assert "item" not in answer
    assert run("inspect", where, "--item", "6").exit_code == 2


def test_the_command_line_tunes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_sources(tmp_path)
    found = run("tune", "rows.parquet", "--budget", "0.1", "--max-workers", "0", "--json", "--quiet")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["storage"]


def test_an_hdf5_file_of_several_datasets_is_asked_for_one_by_a_path_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_sources(tmp_path)
    found = run("inspect", "day.h5")
    assert found.exit_code == 2
    (path,) = re.findall(r"Name one in the path, '(.*?)'", found.stderr)
    assert run("inspect", path).exit_code == 0


def test_an_item_with_values_that_are_not_numbers_says_how_many(shards: Path) -> None:
    assert (
        "  x         float64 (3,), 70 to 72, mean 71, 1 of 3 are NaN" in run("inspect", "shards", "--item", "7").stdout
    )
    answer = json.loads(run("inspect", "shards", "--item", "7", "--json").stdout)["item"]["fields"]["x"]
    assert {name: answer[name] for name in ("min", "max", "mean", "nan")} == {
        "min": 70,
        "max": 72,
        "mean": 71,
        "nan": 1,
    }
