"""Only regular files are opened."""

import os
from pathlib import Path

import pytest

from penstock.core.errors import ReadError, SourceError
from penstock.files.kinds import open_regular_file


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(8)))
    with open_regular_file(path) as file:
        assert os.pread(file.fileno(), 2, 6) == bytes([6, 7])
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SourceError, match=str(wrong)):
            open_regular_file(wrong)
    with pytest.raises(ReadError, match="missing"):
        open_regular_file(tmp_path / "missing")
