"""NumpySource: rows of .npy and .npz files at a path or a URL, each array in its own layout."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from penstock_source_suite import Case, SourceSuite

import penstock as ps
from penstock.core.errors import ReadError, SourceError
from penstock.source import NumpySource

X = np.arange(60 * 4, dtype=">f4").reshape(60, 4)
LABEL = np.array([f"row {number}" for number in range(60)], "U6")


def save(path: Path, kind: str, shift: int = 0) -> Path:
    arrays = {"x": np.asfortranarray(X + shift), "label": LABEL}
    if kind == "npy":
        np.save(path / "a.npy", X + shift)
        return path / "a.npy"
    (np.savez if kind == "npz" else np.savez_compressed)(path / "a.npz", **arrays)
    return path / "a.npz"


class TestNumpyFiles(SourceSuite):
    @pytest.fixture(params=["npy", "npz", "compressed"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        kind, other = request.param, tmp_path / "other"
        other.mkdir()
        path, changed = save(tmp_path, kind), save(other, kind, shift=1)
        native = X.astype(np.float32)

        def truth(item: int) -> dict[str, Any]:
            return {"data": native[item]} if kind == "npy" else {"x": native[item], "label": LABEL[item]}

        return Case(lambda: NumpySource(path), truth, 60, lambda: NumpySource(changed))


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
def test_a_file_at_a_url_has_the_items_of_a_local_one(kind: str, s3: Endpoint) -> None:
    path = save(s3.folder, kind)
    local = NumpySource(path)
    remote = ps.open(str(s3.url / path.name), store=s3.options).source
    items = np.array([59, 3, 4, 5, 3])
    for name, values in remote.take(items).items():
        assert values.tolist() == local.take(items)[name].tolist()
    assert remote.index.digest == local.index.digest


def test_an_archive_is_trained_on_as_it_is(tmp_path: Path) -> None:
    data = ps.open(save(tmp_path, "npz")).fields("x").shuffle(seed=1).batch(7)
    with data.loader(num_workers=2) as loader:
        firsts = sorted(float(row[0]) for batch in loader for row in batch["x"].numpy())
    assert firsts == X[:, 0].tolist()


def test_a_file_that_was_replaced_is_an_error_when_it_is_opened_again(tmp_path: Path) -> None:
    source = NumpySource(save(tmp_path, "npz"))
    source.close()
    save(tmp_path, "npz", shift=1)
    with pytest.raises(ReadError, match=r"a\.npz has changed since it was opened"):
        source.take(np.array([0]))


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    source = NumpySource(save(tmp_path, "npy"))
    os.truncate(tmp_path / "a.npy", 500)
    with pytest.raises(ReadError, match=r"rows 59–59 of .*a\.npy: the file ends"):
        source.take(np.array([0, 59]))


def test_fields_are_those_of_an_archive(tmp_path: Path) -> None:
    assert list(NumpySource(save(tmp_path, "npz"), ["label"]).fields) == ["label"]
    with pytest.raises(SourceError, match=r"has no y\. Its arrays are: x, label"):
        NumpySource(tmp_path / "a.npz", ["y"])
    with pytest.raises(SourceError, match="fields must be left out for"):
        NumpySource(save(tmp_path, "npy"), ["y"])
