"""What the command line prints for a typo, a wrong path, Ctrl-C, and a bug."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import eventually
from penstock_test_processes import is_group_gone, start_session
from typer.testing import CliRunner

from penstock import PlanError, ReadError, create_shards_from_arrays
from penstock.cli import app


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "shards"
    create_shards_from_arrays(folder, {"x": np.arange(40).reshape(20, 2)}, shard_size=5)
    return folder


@pytest.fixture(autouse=True)
def folder(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a dataset, `shards`, whose values identify their items."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written, tmp_path / "shards")
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def first_line(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the first line on stderr; nothing is on stdout."""
    done = run(*arguments)
    assert done.stdout == ""
    return done.exit_code, done.stderr.splitlines()[0]


def test_no_arguments_is_help_and_where_to_begin() -> None:
    done = run()
    assert done.exit_code == 2
    assert "Usage: penstock" in done.stderr
    assert done.stderr.endswith("Error: No command was given. Run `penstock --help` to see all of them.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chekc", "shards"], "Error: No such command 'chekc'. Did you mean 'check'?"),
        (["frobnicate"], "Error: No such command 'frobnicate'."),
        (["check", "shards", "--all", "--wokers", "2"], "Error: No such option: --wokers. Did you mean --workers?"),
        (["check", "shards", "--all", "--frobnicate"], "Error: No such option: --frobnicate."),
        (["--vresion"], "Error: No such option: --vresion. Did you mean --version?"),
        (["check"], "Error: Missing argument 'WHERE'."),
        (["convert"], "Error: Missing argument 'INPUT'."),
    ],
)
def test_a_mistyped_word_is_named_with_the_nearest_that_exists(arguments: list[str], words: str) -> None:
    assert first_line(*arguments) == (2, words)


def test_a_wrong_option_is_followed_by_an_example_and_where_help_is() -> None:
    assert run("check").stderr.splitlines()[1:] == [
        "For example: penstock check shards",
        "Run 'penstock check --help' for all options.",
    ]


def make(folder: Path, what: str) -> None:
    """Put something into the folder `there` that is not a dataset."""
    there = folder / "there"
    there.mkdir()
    if what == "splits":
        for name in ("train", "val"):
            create_shards_from_arrays(there / name, {"x": np.arange(3)}, shard_size=2)
    elif what == "unfinished":
        (there / ".writing").mkdir()
    elif what == "zarr":
        (there / "zarr.json").write_text("{}")
    elif what == "pattern":
        (there / "a-{0..1}.tar.metadata.json").write_text("{}")
    elif what:
        for name in what.split():
            (there / name).touch()


FIVE_LINES = "write a function of five lines (docs/how-to/convert-recordings.md)."
MAKE_ONE = "Make one: penstock convert"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("", "No dataset in there: the folder is empty."),
        ("a.txt", "No dataset in there: it has no dataset_metadata.json, no tar archives and no recordings."),
        ("a.tar", "there has 1 tar archive and no index. Make one: penstock index there"),
        ("a.tar b.tar.gz", "there has 2 tar archives and no index. Make one: penstock index there"),
        ("a.nwb b.nwb", f"No dataset in there, but 2 .nwb files. {MAKE_ONE} 'there/*.nwb' --output DIR"),
        ("a.npy b.txt", f"No dataset in there, but 1 .npy file. {MAKE_ONE} 'there/*.npy' --output DIR"),
        ("splits", "there is not a dataset, but contains train, val. Give one of them: there/train"),
        ("pattern", "The archives in there were indexed by a pattern. Give it: 'there/a-{0..1}.tar'"),
        (
            "unfinished",
            "No dataset in there: its writer has not finished. Run `penstock convert` again with --resume to "
            "continue, or with --overwrite to start again.",
        ),
    ],
)
def test_a_folder_without_a_dataset_says_what_it_has_and_what_to_do(folder: Path, what: str, words: str) -> None:
    make(folder, what)
    for command in ("inspect", "tune"):
        assert first_line(command, "there") == (2, f"Error: {words}")


def test_a_recording_is_no_dataset(folder: Path) -> None:
    make(folder, "zarr")
    words = f"Error: there is a zarr store, not a dataset. {MAKE_ONE} there --output DIR"
    assert first_line("inspect", "there", "--page", "page.html") == (2, words)
    words = "Error: No zarr arrays in there. Give the folder of an array, or of a group with arrays."
    assert first_line("check", "there", "--all") == (2, words)
    assert first_line("index", "there")[1].startswith("Error: An index is one of tars, got the zarr store there.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "shrads"], "No such file or folder: shrads. Did you mean shards?"),
        (["check", "nowhere", "--all"], "No such file or folder: nowhere."),
        (["check", "shrads/train", "--all"], "No such file or folder: shrads/train. Did you mean shards?"),
        (["tune", "rows.npz.npy"], "No such file or folder: rows.npz.npy."),
        (["tune", "empty"], "No dataset in empty: the folder is empty."),
        (
            ["check", "shards/shard_000001.tar", "--all"],
            "shards/shard_000001.tar is one shard of a dataset. Give its folder: ",
        ),
        (["check", "README", "--all"], "README is not a dataset, which is a folder with dataset_metadata.json"),
        (["inspect", "notes.edf"], f"Penstock does not read .edf files, got notes.edf: {FIVE_LINES}"),
        (["inspect", "bold.nii.gz"], f"Penstock does not read .nii.gz files, got bold.nii.gz: {FIVE_LINES}"),
        (["convert", "notes.edf", "-o", "out"], f"Penstock does not read .edf files, got notes.edf: {FIVE_LINES}"),
        (["convert", "empty", "-o", "out"], "An input folder must be a zarr store or contain shards, audio files or"),
        (
            ["convert", "rows.csv", "-o", "out"],
            "rows.csv needs no conversion: penstock.open('rows.csv') reads it where",
        ),
        (
            ["inspect", "rows.csv", "--page", "p.html"],
            "rows.csv is not a dataset of shards, which this is for. penstock.open('rows.csv')",
        ),
        (["check", "lone.tar", "--all"], "lone.tar has no index. Make one: penstock index lone.tar"),
        (["index", "empty"], "No dataset in empty: the folder is empty."),
        (["index", "a file.npy"], "a file.npy is a recording, not a dataset."),
        (["convert", "shrads", "-o", "out"], "No such file or folder: shrads. Did you mean shards?"),
        (["convert", "tars", "-o", "out"], "tars contains tar archives, which need no conversion. Index them: "),
        (["convert", "README", "-o", "out"], "The format of an input must be known from its name (.nwb, "),
        (["convert", "a file.npy", "-o", "out", "-f", "edf"], "--format must be one of 'auto', 'nwb', 'npz', "),
    ],
)
def test_a_wrong_path_or_format_is_a_sentence_with_what_to_do(folder: Path, arguments: list[str], words: str) -> None:
    (folder / "empty").mkdir()
    (folder / "tars").mkdir()
    for name in ("README", "notes.edf", "bold.nii.gz", "rows.csv", "lone.tar", "tars/a.tar"):
        (folder / name).touch()
    np.save(folder / "a file.npy", np.arange(4))
    before = sorted(folder.rglob("*"))
    code, line = first_line(*arguments)
    assert (code, line[: 7 + len(words)]) == (2, f"Error: {words}")
    assert sorted(folder.rglob("*")) == before


def test_what_is_taken_for_a_recording_is_what_convert_reads(folder: Path) -> None:
    from penstock.cli.where import _MANIFEST, _RECORDINGS
    from penstock.convert.formats import inputs_of
    from penstock.shard.manifest import MANIFEST

    for suffix in _RECORDINGS:
        path = folder / f"a{suffix}"
        path.mkdir() if suffix == ".zarr" else path.touch()
        assert [given.path for given in inputs_of([path])] == [path]
    assert MANIFEST == _MANIFEST


def test_an_existing_output_is_kept_and_the_option_that_replaces_it_is_named(folder: Path) -> None:
    np.save(folder / "rows.npy", np.arange(4))
    code, line = first_line("convert", "rows.npy", "-o", "shards")
    assert code == 1
    assert "/shards holds a dataset already. Replace it with --overwrite, or use another folder." in line


def make_verify_fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("penstock.shard.verify.verify_shards", fail)


@pytest.mark.parametrize(
    ("error", "code", "kind", "words"),
    [
        (ReadError("Could not read item 3 of it."), 1, "ReadError", "Could not read item 3 of it."),
        (PlanError("This does not fit."), 2, "PlanError", "This does not fit."),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 1, "PermissionError", "Permission denied: a/b."),
        (
            MemoryError(),
            1,
            "MemoryError",
            "Out of memory. Use fewer workers, or smaller batches or shards.",
        ),
        (
            ZeroDivisionError("by zero"),
            70,
            "ZeroDivisionError",
            "This is a bug in Penstock: ZeroDivisionError: by zero",
        ),
    ],
)
def test_errors_are_sentences_with_codes_of_their_own_and_tracebacks_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, kind: str, words: str
) -> None:
    make_verify_fail(monkeypatch, error)
    assert first_line("check", "shards", "--all") == (code, f"Error: {words}")
    assert "Traceback" not in run("check", "shards", "--all").stderr
    for arguments in (["--debug", "check", "shards", "--all"], ["check", "shards", "--all", "--debug"]):
        done = run(*arguments)
        assert done.exit_code == code
        assert done.stderr.startswith("Traceback (most recent call last):")
        assert f"Error: {words}" in done.stderr.splitlines()
    done = run("check", "shards", "--all", "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout) == {"error": {"type": kind, "message": words}}
    assert done.stderr.startswith(f"Error: {words}\n")


def test_a_bug_says_how_to_see_more_and_what_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import __version__

    make_verify_fail(monkeypatch, ZeroDivisionError("by zero"))
    advice = run("check", "shards", "--all").stderr.splitlines()[1]
    assert advice.startswith("Run the same command with --debug to see the traceback, and report it")
    assert f"penstock {__version__}, Python {sys.version.split()[0]}" in advice


@pytest.mark.parametrize(
    "arguments", [["chekc", "--json"], ["check", "--json"], ["check", "shards", "--all", "--json", "-x"]]
)
def test_what_the_parser_refuses_is_json_too(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["type"] == "UsageError"


def test_what_comes_after_two_dashes_is_an_argument(folder: Path) -> None:
    assert first_line("check", "--", "--debug") == (2, "Error: No such file or folder: --debug.")


@pytest.mark.parametrize(
    ("command", "target"),
    [("check", "shard.verify._verify_shard"), ("index", "shard.index_tars._index_archive")],
)
def test_ctrl_c_stops_verify_and_index_with_130_and_leaves_everything_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, target: str
) -> None:
    if command == "index":
        for path in folder.glob("shards/[!s]*"):
            path.unlink()
        for path in folder.glob("shards/*.tar.*"):
            path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    sent = []

    def interrupted(*_: Any, **__: Any) -> Any:
        # A real signal, from a thread that reads, while the main thread waits for it.
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return [] if command == "check" else (None, [])

    monkeypatch.setattr(f"penstock.{target}", interrupted)
    done = run(command, "shards", "-q", "--json", *["--all"] * (command == "check"))
    assert (done.exit_code, done.stderr) == (130, "\nStopped.\n")
    assert json.loads(done.stdout) == {"error": {"type": "Stopped", "message": "Stopped."}}
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_ctrl_c_ends_a_conversion_and_its_workers_and_publishes_nothing(folder: Path) -> None:
    for number in range(2):
        np.save(folder / f"rows{number}.npy", np.arange(20.0) + 100 * number)
    # Items for minutes, in a file of holes.
    np.lib.format.open_memmap(folder / "rows2.npy", mode="w+", dtype=np.float64, shape=(30_000_000,))
    words = "-m penstock convert rows0.npy rows1.npy rows2.npy -o out --quiet --workers 2"
    with start_session([sys.executable, *words.split()], cwd=folder) as process:

        def has_begun() -> bool:
            assert process.poll() is None
            return any((folder / "out" / ".writing").glob("*.tar"))

        assert eventually(has_begun)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and its workers
        out, errors = process.communicate(timeout=300)
        assert (process.returncode, out, errors) == (130, "", "\nStopped.\n")
        assert eventually(lambda: is_group_gone(process.pid))
    assert not (folder / "out" / "dataset_metadata.json").exists()


def test_a_closed_pipe_is_no_error_message(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "penstock", "inspect", "shards"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_conversion_script_reports_errors_like_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli.main import run_script

    monkeypatch.setattr("sys.argv", ["convert_to_shards.py", "--input", "absent.npy", "--output", "out"])
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stopped:
        run_script()
    assert (stopped.value.code, errors.getvalue()) == (2, "Error: No such file or folder: absent.npy.\n")
