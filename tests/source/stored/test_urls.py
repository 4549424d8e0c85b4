"""Rows of zarr arrays at URLs, through fsspec and obstore."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from penstock import OptionError, SourceError, Span
from penstock.source.stored.source import ZarrSource


def numbers(*shape: int) -> np.ndarray:
    """Return an array of distinct values; none is 0."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype="f4").reshape(shape)


def check_all(source: ZarrSource, wanted: np.ndarray) -> None:
    n = len(wanted)
    for start, stop in ((0, n), (1, n - 1), (n // 2, n // 2)):
        assert source.read(Span(start, stop))["data"].tobytes() == wanted[start:stop].tobytes()
    items = np.array([n - 1, 0, 0, n // 2])
    for reader in (source, pickle.loads(pickle.dumps(source))):
        assert reader.take(items)["data"].tobytes() == wanted[items].tobytes()


@pytest.fixture
def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)


def at_url(url: str, data: np.ndarray, **options: Any) -> str:
    store = zarr.storage.FsspecStore.from_url(url, storage_options={"auto_mkdir": True} if "file:" in url else None)
    zarr.create_array(store, shape=data.shape, chunks=(4, 2), dtype=data.dtype, **options)[...] = data
    return url


@pytest.mark.parametrize("options", [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (8, 4)}])
@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.usefixtures("without_obstore")
def test_urls_are_read_through_fsspec(tmp_path: Path, scheme: str, options: dict[str, Any]) -> None:
    data = numbers(23, 3)
    url = at_url(f"{scheme}://{tmp_path}/store/a", data, **options)
    source = ZarrSource(url)
    check_all(source, data)
    assert source.index.largest_chunk == 4
    chosen = ZarrSource(url.removesuffix("/a"), {"x": ("a", 1)}).take(np.array([22, 0]))["x"]
    assert chosen.tolist() == data[[22, 0], 1].tolist()


def test_urls_are_read_through_obstore(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    data = numbers(23, 3)
    zarr.create_array(tmp_path / "a", data=data, chunks=(4, 2))
    check_all(ZarrSource(f"file://{tmp_path}/a"), data)


def test_schemes_that_obstore_does_not_support_are_read_through_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    data = numbers(9, 3)
    check_all(ZarrSource(at_url(f"memory://{tmp_path}/b", data)), data)


@pytest.mark.parametrize("url", ["memory://nothing/there", "file:///nothing/there"])
def test_a_url_without_an_array_is_named(url: str) -> None:
    with pytest.raises(SourceError, match=f"No zarr array in {url}: it has neither zarr.json nor .zarray"):
        ZarrSource(url)


def test_what_is_no_url_of_a_store_is_refused() -> None:
    with pytest.raises(OptionError, match="Could not open nosuchscheme://a"):
        ZarrSource("nosuchscheme://a/b")
    with pytest.raises(SourceError, match=r"A \.npy file must be on this machine, got the URL file:///a/b\.npy"):
        ZarrSource("file:///a/b.npy")
