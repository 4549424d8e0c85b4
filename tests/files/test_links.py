"""Links planted by others where writers put their files: what they lead to stays as it is.

Each writer of the package runs in a folder that has a link, to a file or a folder of the user, at every temporary name
that could be guessed: from the name of the file, the machine, the process and the thread.
"""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_cellmap_parts import INPUTS, RAW, TARGETS, write_image

from penstock.convert.convert import convert
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import DamageError, OptionError, WriteError
from penstock.files.durable import write_aside
from penstock.files.figures import save_figure
from penstock.observe.tuning import Tuning
from penstock.recipes.cellmap.predictions import CellMapDatasetWriter
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from penstock.source.tar.quarantine import Quarantine

MINE = ("thesis.txt", "options.json", "dataset_metadata.json", "part-0")
HOST, PID, THREAD = os.uname().nodename, os.getpid(), threading.get_ident()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in MINE:
        (folder / name).write_text("three years")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def is_untouched(victim: Path) -> bool:
    return {path.name: path.read_text() for path in victim.iterdir()} == dict.fromkeys(MINE, "three years")


def write_shards(out: Path) -> None:
    (out / ".writing").mkdir(exist_ok=True)
    (out / ".writing" / "options.json").unlink(missing_ok=True)
    writer = ShardWriter(out, WriteOptions(), resume=True)  # which leaves what is in the folder
    writer.write({"x": np.arange(3)}, None, None)
    writer.commit()


def write_figure(out: Path) -> None:
    from matplotlib.figure import Figure

    save_figure(Figure(), out / "a.png", 10.0)


def write_tuning(out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tuning, "to_dict", lambda _: {})
        Tuning.save(object.__new__(Tuning), out / "tuned.json")


FILES: dict[str, tuple[Callable[..., None], str, str]] = {
    "any file": (lambda out: write_aside(out / "a", b"new"), f".a.{PID}.aside", "a"),
    "shard": (write_shards, f".writing/shard_000000.tar.{HOST}-{PID}.part", "shard_000000.tar"),
    "side index": (write_shards, f".writing/.shard_000000.tar.index.{PID}.aside", "shard_000000.tar.index"),
    "manifest": (write_shards, f".writing/.dataset_metadata.json.{PID}.aside", "dataset_metadata.json"),
    "options": (write_shards, f".writing/.options.json.{PID}.aside", "dataset_metadata.json"),
    "figure": (write_figure, "a.png.part", "a.png"),
    "tuning": (write_tuning, "tuned.json.part", "tuned.json"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_link_at_a_name_that_can_be_guessed_is_not_followed(case: str, victim: Path, out: Path) -> None:
    write, planted, written = FILES[case]
    (out / planted).parent.mkdir(exist_ok=True)
    (out / planted).symlink_to(victim / "thesis.txt")
    write(out)
    assert is_untouched(victim)
    assert (out / written).is_file()
    assert not (out / written).is_symlink()


def begin_shards(out: Path, how: str) -> None:
    ShardWriter(out, WriteOptions(), resume=how == "resume").abandon()


def convert_rows(out: Path, how: Any) -> None:
    np.save(out.parent / "rows.npy", np.arange(12).reshape(6, 2))
    convert([NpyInput(out.parent / "rows.npy")], out, ConvertOptions(WriteOptions(2)), existing=how)


def begin_image(out: Path, how: str) -> None:
    raw = out.parent / "em"
    if not raw.exists():
        write_image(raw, RAW)
    CellMapDatasetWriter(
        str(raw), f"{out}/mito", ["mito"], INPUTS, TARGETS, overwrite=how == "overwrite", resume=how == "resume"
    ).close()


@pytest.mark.parametrize("how", ["overwrite", "resume"])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        *((begin_shards, name) for name in (".writing", ".written")),
        *((convert_rows, name) for name in (".writing", ".written")),
        *((begin_image, name) for name in (".mito.writing", ".mito.written")),
    ],
)
def test_a_staging_folder_that_is_a_link_is_refused_with_what_to_do(
    write: Callable[[Path, str], None], name: str, how: str, victim: Path, out: Path
) -> None:
    (out / name).symlink_to(victim)
    with pytest.raises(
        WriteError, match=rf"{name} must be a folder of Penstock, got a symbolic link\. Remove the link"
    ):
        write(out, how)
    assert is_untouched(victim)
    assert [path.name for path in out.iterdir()] == [name]
    (out / name).unlink()
    write(out, how)


@pytest.mark.parametrize("how", ["overwrite", "resume"])
@pytest.mark.parametrize(
    ("write", "name", "target"),
    [
        *(
            (begin_shards, f".writing/{name}", "thesis.txt")
            for name in ("options.json", "shard_000000.tar", "stale.json")
        ),
        *(
            (convert_rows, f".writing/{name}", "thesis.txt")
            for name in ("shard_000000.tar.index", "dataset_metadata.json")
        ),
        *((begin_image, f".mito.writing/{name}", "") for name in ("image", "image/s0")),
        (begin_image, ".mito.writing/options.json", "options.json"),
        (begin_image, ".mito.writing/image/s0/0", "thesis.txt"),
    ],
)
def test_a_link_in_a_staging_folder_is_refused(  # noqa: PLR0917  # fixtures and parameters
    write: Callable[[Path, str], None], name: str, target: str, how: str, victim: Path, out: Path
) -> None:
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(victim / target)
    with pytest.raises(WriteError, match=rf"{name} must be a file or folder of Penstock, got a symbolic link"):
        write(out, how)
    assert is_untouched(victim)
    (out / name).unlink()
    write(out, how)


def test_a_link_that_was_replaced_is_no_obstacle(victim: Path, out: Path) -> None:
    (out / ".writing").mkdir()
    (out / ".writing" / "replaced.json").symlink_to(victim / "dataset_metadata.json")
    write_shards(out)
    assert is_untouched(victim)


def test_a_list_of_bad_items_is_not_written_through_a_link(victim: Path, out: Path) -> None:
    quarantine = Quarantine(out / "quarantine.jsonl", "mine", 3)
    (out / "quarantine.jsonl").symlink_to(victim / "thesis.txt")
    with pytest.raises(WriteError, match="It must be a regular file, got a symbolic link"):
        quarantine.add(1, "a.tar", DamageError("a.tar", 1, "flipped"))
    with pytest.raises(OptionError, match="quarantine must be a writable file"):
        Quarantine(out / "quarantine.jsonl", "mine", 3)
    assert is_untouched(victim)


def write_list(out: Path) -> None:
    Quarantine(out / "quarantine.jsonl", "mine", 3).add(1, "a.tar", DamageError("a.tar", 1, "flipped"))


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002], ids=oct)
@pytest.mark.parametrize(
    "write",
    [
        write_shards,
        lambda out: begin_image(out, "overwrite"),
        write_figure,
        write_tuning,
        write_list,
    ],
)
def test_files_and_folders_have_the_permissions_that_the_umask_leaves(
    write: Callable[[Path], None], umask: int, out: Path
) -> None:
    before = os.umask(umask)
    try:
        write(out)
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    assert found == {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in found}
    assert found
