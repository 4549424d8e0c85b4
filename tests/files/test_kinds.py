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


@pytest.mark.parametrize("url", [URL, "gs://bucket", "https://host/a.tar", "hf://datasets/a/b", Path(URL)], ids=str)
def test_urls_are_refused(url: str | Path) -> None:
    with pytest.raises(OptionError, match="one of this machine, got the URL '"):
        local_path(url)


_NOBODY = ps.StoreOptions(endpoint="http://127.0.0.1:1", anonymous=True, retries=0)


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: ps.create_shards_from_arrays(URL, {"x": np.arange(2)}, 2, store=_NOBODY), ps.WriteError),
        (lambda: ps.WebDatasetWriter(URL, 2, store=_NOBODY), ps.WriteError),
        (lambda: ps.convert_to_shards("rows.npy", URL, store=_NOBODY), ps.WriteError),
        (lambda: ps.AudioSource(URL), OptionError),
        (lambda: ps.AudioSource([f"{URL}/a.wav"]), OptionError),
    ],
)
def test_a_url_never_becomes_a_folder(
    use: Callable[[], Any], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.arange(6).reshape(3, 2))
    with pytest.raises(error, match="s3://bucket/shards"):
        use()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
