"""URLs are no paths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import OptionError
from penstock.files.kinds import local_path

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
