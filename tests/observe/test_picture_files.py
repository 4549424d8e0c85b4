"""The file of an item figure: its format, refused paths, and that matplotlib stays as it was."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from penstock import OptionError
from penstock.core.errors import MissingDependency, WriteError
from penstock.observe.picture import plot_item

SPIKES = np.random.default_rng(7).poisson(0.4, (100, 96))


@pytest.mark.parametrize("name", ["item.PNG", "item.jpg", "item.pdf", "item.svg"])
def test_the_suffix_says_the_format(tmp_path: Path, name: str) -> None:
    plot_item({"x": np.arange(3)}, tmp_path / name)
    starts = {"item.PNG": b"\x89PNG", "item.jpg": b"\xff\xd8\xff", "item.pdf": b"%PDF", "item.svg": b"<?xml"}
    assert (tmp_path / name).read_bytes().startswith(starts[name])
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["item.doc", "item", "item.pgf"])
def test_an_unknown_suffix_names_those_that_are_known(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"suffix of .*item.* must be one of .*\.pdf, \.png"):
        plot_item({"x": SPIKES}, tmp_path / name)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"directory {re.escape(str(tmp_path / 'gone'))} does not exist"):
        plot_item({"x": SPIKES}, tmp_path / "gone" / "item.png")


def test_a_directory_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "item.png").mkdir()
    with pytest.raises(OptionError, match="must be a file, got the directory"):
        plot_item({"x": SPIKES}, tmp_path / "item.png")


def test_an_item_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must map field names to values.* got ndarray"):
        plot_item(SPIKES, tmp_path / "item.png")  # type: ignore[arg-type]


def test_a_failure_leaves_the_old_picture_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "item.png"
    path.write_bytes(b"old")

    def full(*_: Any) -> int:
        raise OSError("disk full")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(WriteError, match=r"Could not write .*item\.png: disk full"):
        plot_item({"x": SPIKES}, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"Plotting needs matplotlib.*penstock\[report\]"):
        plot_item({"x": SPIKES}, tmp_path / "item.png")


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    plot_item({"x": np.arange(20), "y": SPIKES}, tmp_path / "item.png")
    assert dict(mpl.rcParams) == before


def test_matplotlib_is_imported_on_use_and_pyplot_never(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, pathlib, penstock.observe.picture as items\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"items.plot_item({{'x': numpy.arange(20)}}, pathlib.Path({str(tmp_path / 'item.png')!r}))\n"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
