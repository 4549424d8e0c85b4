"""The command line names options and Python names arguments; paths are named once; numbers agree with their nouns."""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from penstock_nwb_parts import add_units, new_file, save_nwb
from typer.main import get_command
from typer.testing import CliRunner

import penstock
from penstock import OptionError, PenstockError, convert_to_shards
from penstock.cli import app
from penstock.cli.errors import name_options
from penstock.convert import ConvertOptions, ReadOptions
from penstock.core.text import count
from penstock.shard import WriteOptions

SRC = Path(penstock.__file__).parent
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # a group
OPTIONS = {name for command in COMMANDS.values() for option in command.params for name in option.opts}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.arange(20.0)[:, None])
    np.savez("two.npz", lfp=np.arange(10), spikes=np.arange(3))
    soundfile.write("tone.wav", np.sin(np.arange(800) / 10), 800)
    Path("bad.npy").write_bytes(b"no array")
    Path("notes.txt").touch()
    Path("notes").touch()
    Path("empty").mkdir()
    convert_to_shards("rows.npy", "done", show_progress=False)
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code in (1, 2), done.output
    return done.stderr


def test_names_of_metadata_are_no_options_and_those_without_a_value_are_not_listed() -> None:
    nwb = new_file()
    del nwb.subject.fields["subject_id"]
    add_units(nwb, [np.arange(0, 3, 0.01)])
    save_nwb(nwb, Path("a.nwb"))
    said = run(
        *["convert", "a.nwb", "-o", "out", "--modalities", "spikes", "--split", "a=0.5,b=0.5", "--group-by", "subject"]
    )
    names = ("bin_size_ms", "file", "identifier", "sampling_rates", "session", "start_time", "stop_time")
    assert f"(--group-by subject). It has {', '.join(map(repr, names))}. Add the column" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("rows.npy --shard-size 0", "--shard-size must be an integer >= 1, got 0."),
        ("rows.npy --overlap 0.5", "--overlap must be 0 without --sequence-length, got 0.5."),
        ("rows.npy --sequence-length 99", "--sequence-length must be at most 20, the number of rows of rows.npy"),
        ("rows.npy --compression zip", "--compression must be one of 'none', 'gz', 'bz2', 'xz', got 'zip'."),
        ("rows.npy --layout rows", "--layout must be 'samples', 'columns' or 'auto', got 'rows'."),
        ("rows.npy --split a", "--split must be NAME=FRACTION pairs, such as train=0.8,val=0.1,test=0.1, got 'a'."),
        ("rows.npy --split a=0.5,b=0.5", "Use fewer splits, or --group-by time."),
        ("rows.npy --split a=0.5,b=0.5 --group-by subject", "Use --group-by file or --group-by time."),
        ("rows.npy --resume --overwrite", "At most one of --resume and --overwrite must be set"),
        ("two.npz", "Name the arrays that belong together, such as --fields"),
        ("two.npz --fields ,", "--fields must be one or more names, such as lfp,spikes, got ','."),
        ("notes", "got notes. Give it, such as --format npy."),
        (
            "notes.txt",
            "write a function of five lines (docs/how-to/convert-recordings.md). With --format files, whole files",
        ),
        ("empty", "or give the format, such as --format zarr."),
        ("tone.wav --window-seconds 0", "--window-seconds must be"),
        ("tone.wav --window-seconds 0.0001", "but --window-seconds 0.0001 has none"),
        ("tone.wav --rate-hz -1", "--rate-hz must be"),
        ("absent.nwb", "No such file or folder: absent.nwb."),
    ],
)
def test_a_command_names_options_that_it_has_and_each_path_once(arguments: str, words: str) -> None:
    said = run("convert", *arguments.split(), "-o", "out", "-q")
    assert words in said
    assert set(re.findall(r"(?<=\s)--[a-z-]+", said)) <= OPTIONS
    assert said.count(arguments.split(maxsplit=1)[0]) <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "done", "--item", "20"], "--item must be 0–19, got 20."),
        (["convert", "rows.npy", "-o", "done"], "done holds a dataset already. Replace it with --overwrite, or"),
        (["check", "done", "--all", "--item", "3"], "No such option: --item.\n"),
        (["convert", "rows.npy", "--inptu", "a", "-o", "out"], "No such option: --inptu. Did you mean --input?"),
    ],
)
def test_other_commands_name_their_own_options(arguments: list[str], words: str) -> None:
    assert words in run(*arguments)


def test_python_names_arguments() -> None:
    with pytest.raises(OptionError, match=r"^overlap must be 0 without sequence_length, got 0.5"):
        convert_to_shards("rows.npy", "out", reading=ReadOptions(overlap=0.5))
    with pytest.raises(OptionError, match=r"^shard_size must be an integer >= 1"):
        convert_to_shards("rows.npy", "out", options=ConvertOptions(WriteOptions(shard_size=0)))
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] in ("cli", "demo", "report"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                text = "".join(part.value for part in ast.walk(node) if _is_text(part))
                assert not set(re.findall(r"--[a-z-]+", text)) & OPTIONS, f"{path}: {text}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_options_named_by_messages_of_the_command_line_exist() -> None:
    for path in (SRC / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value))
                assert named <= OPTIONS | {"--input", "--debug", "--version", "--help"}, f"{path}: {node.value}"


def test_a_path_that_looks_like_an_argument_stays_as_it_is() -> None:
    message = "Could not read /data/split=train/shard_size/a.npy: shard_size must be >= 1, with overwrite=True."
    assert name_options(message, COMMANDS["convert"]) == (
        "Could not read /data/split=train/shard_size/a.npy: --shard-size must be >= 1, with --overwrite."
    )
    assert name_options(message, COMMANDS["check"]) == message


def test_one_of_a_thing_is_singular(folder: Path) -> None:
    np.save("one.npy", np.arange(1.0)[:, None])
    for arguments, words in (
        (["convert", "one.npy", "-o", "one"], "1 item in 1 shard"),
        (["convert", "one.npy", "-o", "other", "--dry-run"], "1 item in 1 shard"),
        (["inspect", "one"], "1 in 1 shard of up to"),
        (["inspect", "one"], "Converted from 1 input\n"),
        (["check", "one", "--all"], "1 item in 1 shard"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert words in done.output
        assert re.search(r"\b1 (items|samples|shards|inputs|workers|files|problems)\b", done.output) is None
    nouns = ("item", "batch", "epoch", "process", "modality")
    assert [count(2, noun) for noun in nouns] == ["2 items", "2 batches", "2 epochs", "2 processes", "2 modalities"]


def test_an_error_of_the_operating_system_names_the_file_once(folder: Path) -> None:
    (folder / "rows.npy").unlink()
    (folder / "rows.npy").symlink_to("nowhere")
    with pytest.raises(PenstockError) as caught:
        convert_to_shards(folder / "*.npy", "out", show_progress=False)
    assert str(caught.value).count("rows.npy") == 1


def test_the_help_of_convert_has_a_section_for_each_format_of_inputs() -> None:
    sections: dict[str, set[str]] = {}
    for parameter in COMMANDS["convert"].params:
        sections.setdefault(getattr(parameter, "rich_help_panel", None) or "", set()).update(parameter.opts)
    assert {"--modalities", "--bin-size-ms", "--align", "--missing"} <= sections["NWB files"]
    assert {"--window-seconds", "--channels", "--clips"} <= sections["Audio"]
    assert {"--fields", "--axis"} <= sections["Arrays (npz, zarr)"]
    assert {"--sequence-length", "--overlap"} <= sections["NWB files, arrays and audio"]
