"""The folder in which archives are indexed: one at a time, and nothing of a killed one stays."""

import os
from pathlib import Path

import numpy as np
import pytest
from penstock_test_shards import archive, index_folder, npy

from penstock.core.errors import WriteError
from penstock.files.durable import create_aside
from penstock.files.locks import FolderLock
from penstock.shard.index_tars import index_archives
from penstock.shard.manifest import MANIFEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    archive(tmp_path / "a.tar", [{"npy": npy(np.array([1, 2]))}])
    return tmp_path


def test_what_a_killed_index_left_is_removed_and_nothing_else(folder: Path) -> None:
    for name in ("a.tar.index", MANIFEST, "report.html"):
        os.close(create_aside(folder / name)[0])
    (folder / "b.tar.part").write_bytes(b"a download")
    index_folder(folder)
    first, *others = sorted(path.name for path in folder.iterdir())
    assert first.startswith(".report.html.")
    assert others == ["a.tar", "a.tar.index", "b.tar.part", MANIFEST]


def test_two_do_not_index_a_folder_at_once(folder: Path) -> None:
    lock = FolderLock(folder)
    with pytest.raises(WriteError, match="Another writer is at work"):
        index_archives(folder)
    lock.release()
    index_folder(folder)
