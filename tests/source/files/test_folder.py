"""FolderSource: files and classes as torchvision's ImageFolder lists them; a folder that changes is noticed."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_source_suite import Case, ShortSuite
from PIL import Image

from penstock import Balanced, FolderSource, OptionError, ReadError, SourceError

CLASSES = ["cat", "dog", "eel"]
FILES = [("cat", "a.png"), ("cat", "b.png"), ("dog", "a.png"), ("eel", "a.png"), ("eel", "c.png"), ("eel", "d.png")]


def write(root: Path, offset: int = 0) -> Path:
    for number, (name, file) in reversed(list(enumerate(FILES))):  # in another order than they come
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number, offset)).save(root / name / file)
    return root


def pixels(number: int, offset: int = 0) -> np.ndarray:
    return np.full((2, 3 + offset, 3), 10 * number + offset, np.uint8)


class TestFolder(ShortSuite):
    @pytest.fixture(params=["pattern", "folder"])
    def case(self, tmp_path: Path, request: pytest.FixtureRequest) -> Case:
        def make(offset: int) -> FolderSource:
            root = tmp_path / str(offset)
            root = root if root.exists() else write(root, offset)
            return FolderSource(root / "*" / "*.png" if request.param == "pattern" else root)

        def truth(item: int) -> dict[str, Any]:
            name, file = FILES[item]
            path = str(tmp_path / "0" / name / file)
            return {"image": pixels(item), "label": np.int64(CLASSES.index(name)), "path": path}

        return Case(partial(make, 0), truth, len(FILES), partial(make, 1))


def test_classes_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    source = FolderSource(str(write(tmp_path) / "*/*.png"), shape=(2, 3, 3))
    assert source.classes == CLASSES
    assert source.class_to_idx == {"cat": 0, "dog": 1, "eel": 2}
    assert source.labels.tolist() == [0, 0, 1, 2, 2, 2]
    assert source.fields["image"].shape == (2, 3, 3)
    assert FolderSource(tmp_path / "dog/*.png").classes == ["dog"]


def test_files_of_other_kinds_and_in_folders_below(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "old").mkdir()
    Image.fromarray(pixels(7)).save(tmp_path / "cat" / "old" / "z.JPG")
    source = FolderSource(tmp_path)
    assert source.labels.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert source.take(np.array([2]))["path"][0].endswith("old/z.JPG")


def test_labels_are_columns_and_balance_classes(tmp_path: Path) -> None:
    source = FolderSource(write(tmp_path))
    (tmp_path / "eel" / "a.png").write_bytes(b"")  # no file is read for its label
    assert source.columns("label")["label"].tolist() == source.labels.tolist()
    assert len(source.where("label != 2").index) == 3
    Balanced(source.labels).check(source.index)


def test_where_a_folder_lies_does_not_matter_for_the_identity(tmp_path: Path) -> None:
    first = FolderSource(write(tmp_path / "a")).index.digest
    assert FolderSource((tmp_path / "a").rename(tmp_path / "b")).index.digest == first


def remove(root: Path) -> None:
    (root / "dog" / "a.png").unlink()


def add(root: Path) -> None:
    Image.fromarray(pixels(1)).save(root / "dog" / "new.png")


def add_class(root: Path) -> None:
    (root / "fox").mkdir()
    Image.fromarray(pixels(1)).save(root / "fox" / "a.png")


@pytest.mark.parametrize("given", ["", "*/*.png"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, r"1 file removed \(.*dog/a\.png\)"),
        (add, r"1 file added \(.*dog/new\.png\)"),
        (add_class, r"1 file added \(.*fox/a\.png\)"),
    ],
)
def test_files_that_come_or_go_are_named(
    tmp_path: Path, given: str, change: Callable[[Path], None], message: str
) -> None:
    source = FolderSource(str(write(tmp_path) / given))
    source.check()
    os.utime(tmp_path / "dog", ns=(0, 0))  # the clock of dates has ticks of some milliseconds
    os.utime(tmp_path, ns=(0, 0))
    source.check()
    change(tmp_path)
    with pytest.raises(ReadError, match=message):
        source.check()
    with pytest.raises(ReadError, match=message):
        pickle.loads(pickle.dumps(source)).take(np.array([0]))


def test_a_file_that_is_removed_or_changed_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    source = FolderSource(write(tmp_path))
    remove(tmp_path)
    with pytest.raises(ReadError, match=r"dog/a\.png \(item 2\): No such file"):
        source.take(np.array([2]))
    Image.fromarray(pixels(9, 1)).save(tmp_path / "cat" / "a.png")
    with pytest.raises(ReadError, match=r"cat/a\.png \(item 0\) has changed"):
        source.take(np.array([0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda root: FolderSource(root / "*" / "*.jpg"), r"No file matches .*\*/\*\.jpg"),
        (lambda root: FolderSource(root / "cat"), r"No file matches .*cat\. It must have a folder for each class"),
        (lambda root: FolderSource(root / "none"), r"No file matches .*none"),
        (lambda root: FolderSource(root, decode="npz"), "decode must be one of"),
        (lambda root: FolderSource(root, name="label"), "name must be another one than 'label' and 'path'"),
        (lambda root: FolderSource("s3://bucket/*/*.png"), "must be one of this machine, got the URL"),
    ],
)
def test_bad_input(tmp_path: Path, call: Any, message: str) -> None:
    with pytest.raises((OptionError, SourceError), match=message):
        call(write(tmp_path))
