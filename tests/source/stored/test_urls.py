"""Rows of zarr arrays at URLs."""

import pickle
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


@pytest.mark.parametrize("options", [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (8, 4)}])
def test_arrays_of_both_formats_are_read_at_urls(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("obstore")
    data = numbers(23, 3)
    zarr.create_array(tmp_path / "store" / "a", data=data, chunks=(4, 2), **options)
    source = ZarrSource(f"file://{tmp_path}/store/a")
    check_all(source, data)
    assert source.index.largest_chunk == 4
    chosen = ZarrSource(f"file://{tmp_path}/store", {"x": ("a", 1)}).take(np.array([22, 0]))["x"]
    assert chosen.tolist() == data[[22, 0], 1].tolist()


def test_a_url_without_an_array_is_named() -> None:
    url = "file:///nothing/there"
    with pytest.raises(SourceError, match=f"No zarr array in {url}: it has neither zarr.json nor .zarray"):
        ZarrSource(url)


def test_what_is_no_url_of_a_store_is_refused() -> None:
    with pytest.raises(OptionError, match="Could not open nosuchscheme://a"):
        ZarrSource("nosuchscheme://a/b")
    with pytest.raises(SourceError, match=r"A \.npy file must be on this machine, got the URL file:///a/b\.npy"):
        ZarrSource("file:///a/b.npy")
