"""Reading the chunks under patches ahead."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_hint_checks import check_read_ahead, check_something_missing, drop_pages
from penstock_ome_parts import write_ome_image
from penstock_page_cache import cached_pages
from penstock_special_files import plant

from penstock.core.errors import PenstockError
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource

_SIDE, _CHUNK = 64, 16
_TRUTH = np.arange(_SIDE**3, dtype=np.float32).reshape(_SIDE, _SIDE, _SIDE)


def write_volume(path: Path, **options: Any) -> Multiscale:
    zarr.create_array(path, data=_TRUTH, chunks=(_CHUNK,) * 3, fill_value=-1, **options)
    return Multiscale.plain(path, (1, 1, 1))


def cube(image: Any, side: int) -> VolumeSource:
    return VolumeSource({"raw": VolumeArray(image, (side,) * 3, (1, 1, 1))}, pad=False)


def files_of(folder: Path, names: Any) -> list[Any]:
    return [(folder / name, 0, (folder / name).stat().st_size) for name in names]


def test_the_chunks_under_a_patch_are_read_ahead_and_no_others(tmp_path: Path) -> None:
    source = cube(write_volume(tmp_path / "x", zarr_format=2), 8)
    items = source.item_at([[7.5, 7.5, 7.5], [16, 56, 40], [16, 56, 40]])
    names = ["0.0.0", "0.3.2", "1.3.2"]
    check_read_ahead(tmp_path, lambda: source.prepare(items), files_of(tmp_path / "x", names))
    found = source.take(items)["raw"]
    assert (found[0, 0] == _TRUTH[4:12, 4:12, 4:12]).all()
    # They are decoded now, and not read again.
    drop_pages(tmp_path)
    assert source.prepare(items) == 0
    assert not any(cached_pages(path).any() for path, _, _ in files_of(tmp_path / "x", names))
    source.close()
    check_something_missing(tmp_path, lambda: source.prepare(items))
    assert (source.take(items)["raw"] == found).all()


def test_chunks_in_shards_are_read_ahead(tmp_path: Path) -> None:
    source = cube(write_volume(tmp_path / "x", shards=(32, 64, 64)), 8)
    items = source.item_at([[7.5, 7.5, 7.5], [55.5, 55.5, 55.5]])
    check_something_missing(tmp_path, lambda: source.prepare(items))
    assert (source.take(items)["raw"][1, 0] == _TRUTH[52:60, 52:60, 52:60]).all()


def test_channels_in_the_same_chunks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(2 * 8 * 16 * 16, dtype=np.float32).reshape(2, 8, 16, 16)
    write_ome_image(tmp_path / "x", data, "czyx", levels=1)
    image = Multiscale.opened(tmp_path / "x", at={"c": 0})
    other = Multiscale.opened(tmp_path / "x", at={"c": 1})
    source = VolumeSource({"raw": VolumeArray([image, other, None], (4, 4, 4), (1, 1, 1))})
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(str(path)), real(path, *rest))[1])
    source.prepare(np.array([0, 0, 1]))
    monkeypatch.undo()
    assert opened
    assert len(set(opened)) == len(opened)
    stored = {str(path) for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert set(opened) <= stored


def test_the_number_of_chunks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr.create_array(tmp_path / "x", data=_TRUTH[:12, :12, :12], chunks=(1, 1, 2), zarr_format=2)
    source = cube(Multiscale.plain(tmp_path / "x", (1, 1, 1)), 10)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(str(path)), real(path, *rest))[1])
    source.prepare(np.arange(len(source.index)))
    assert len(opened) == 512


def test_bytes_of_volumes_are_counted_once(tmp_path: Path) -> None:
    image = write_volume(tmp_path / "x", zarr_format=2, compressors=None)
    fields = {name: VolumeArray(image, (4, 4, 4), (1, 1, 1)) for name in "ab"}
    assert VolumeSource(fields).stored_bytes == _TRUTH.nbytes
    assert cube(Multiscale.plain(f"file://{tmp_path / 'x'}", (1, 1, 1)), 4).stored_bytes == _TRUTH.nbytes


@pytest.mark.parametrize("fault", ["truncated", "removed", "fifo"])
def test_a_chunk_that_changes_raises_what_it_did_before_when_it_is_read(tmp_path: Path, fault: str) -> None:
    image = write_volume(tmp_path / "x", zarr_format=2)
    chunk = tmp_path / "x" / "0.0.0"
    messages = []
    for is_prepared in (False, True):
        source = cube(image, 8)
        content = chunk.read_bytes()
        with plant("fifo", chunk):  # whatever is there in the end is removed
            if fault != "fifo":
                chunk.unlink()
                chunk.write_bytes(content[:20])
            if fault == "removed":
                chunk.unlink()
            if is_prepared:
                assert source.prepare(np.array([0, 1])) >= 0
            with pytest.raises(PenstockError) as caught:
                source.take(np.array([0, 1]))
            messages.append((type(caught.value), str(caught.value)))
            chunk.touch()
        chunk.write_bytes(content)
    assert messages[0] == messages[1]
