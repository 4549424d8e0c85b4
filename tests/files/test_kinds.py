"""Only regular files are opened, and URLs are no paths."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.files.kinds import local_path, open_regular_file
from penstock.shard.index_tars import index_archives


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


URL = "s3://bucket/shards"


def test_paths_of_this_machine_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("shards") == tmp_path / "shards"
    assert local_path(tmp_path / "a:b") == tmp_path / "a:b"
    assert local_path("a:b/c") == tmp_path / "a:b/c"


@pytest.mark.parametrize("url", [URL, "gs://bucket", "https://host/a.tar", "memory://x", Path(URL)], ids=str)
def test_urls_are_refused(url: str | Path) -> None:
    with pytest.raises(OptionError, match="one of this machine, got the URL '"):
        local_path(url)


@pytest.mark.parametrize(
    "use",
    [
        lambda: ps.create_shards_from_arrays(URL, {"x": [1, 2]}, 2),
        lambda: ps.WebDatasetWriter(URL, 2),
        lambda: ps.convert_to_shards("rows.npy", URL),
        lambda: ps.TarSource(URL),
        lambda: ps.create_webdataset_dataloader(URL),
        lambda: index_archives(f"{URL}/{{000..003}}.tar"),
        lambda: ps.AudioSource(URL),
        lambda: ps.AudioSource([f"{URL}/a.wav"]),
    ],
)
def test_a_url_never_becomes_a_folder(use: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.arange(6).reshape(3, 2))
    with pytest.raises(OptionError, match="got the URL 's3://bucket/shards"):
        use()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
