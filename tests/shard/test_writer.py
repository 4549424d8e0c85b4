"""Writing: the same bytes each time, in shards of the size that was asked for, all or nothing."""

import gc
import io
import json
import os
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import TarSource
from penstock.core.errors import OptionError, SourceError, WriteError
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.shard.manifest import MANIFEST
from penstock.shard.outputs.write_options import WriteOptions
from tests.shard.samples import contents, metadata, numbers, open_files_in, sample, start_writer, write

# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gz", "bz2", "xz"])
@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_the_same_samples_give_the_same_bytes(compression: Any, array_format: Any, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, compression=compression, array_format=array_format)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    assert numbers(tmp_path / "one") == list(range(7))


def test_a_shard_is_a_plain_tar(tmp_path: Path) -> None:
    write(tmp_path)
    with tarfile.open(tmp_path / "shard_000001.tar") as tar:
        names = tar.getnames()
        about = tar.extractfile("sample_000000004.metadata.json")
        array = tar.extractfile("sample_000000004.x.npy")
        assert about is not None
        assert array is not None
        assert json.load(about)["number"] == 4
        assert np.load(io.BytesIO(array.read())).tolist() == [4, -4]
    assert names == [f"sample_{n:09d}.{suffix}" for n in (3, 4, 5) for suffix in ("x.npy", "note.txt", "metadata.json")]


def test_the_folder_holds_shards_indexes_and_the_manifest_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    shards = [f"shard_{n:06d}.tar" for n in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [MANIFEST, *shards, *(f"{s}.index" for s in shards)]
    )


@pytest.mark.parametrize(("shard_size", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (100, [7])])
def test_shards_have_the_requested_number_of_samples(shard_size: int, sizes: list[int], tmp_path: Path) -> None:
    assert [shard.n_items for shard in write(tmp_path, shard_size=shard_size).shards] == sizes
    assert numbers(tmp_path) == list(range(7))
    places = [(about["shard_idx"], about["sample_idx_in_shard"]) for about in metadata(tmp_path)]
    assert places == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("limit", [4608 + 512, 7000, 10_000, 14_848, 20_000, 10**6])
def test_no_shard_exceeds_the_requested_size(limit: int, compression: Any, tmp_path: Path) -> None:
    manifest = write(tmp_path, 20, shard_size=100, max_shard_bytes=limit, compression=compression)
    assert all(shard.tar_bytes <= limit for shard in manifest.shards)
    assert all((tmp_path / shard.name).stat().st_size == shard.stored_bytes for shard in manifest.shards)
    assert numbers(tmp_path) == list(range(20))
    # No shard ends much earlier than it must: another sample and one tar block would not have fitted.
    one = 6 * 512 + 512
    assert all(shard.tar_bytes + one > limit for shard in manifest.shards[:-1])


def test_a_sample_too_large_for_a_shard_is_refused_and_the_writer_continues(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, max_shard_bytes=8192)
    writer.write({"x": np.arange(10)}, None, None)
    with pytest.raises(OptionError, match=r"a shard of 8192 bytes, but sample 1 needs \d+\. Raise max_shard_bytes"):
        writer.write({"x": np.arange(10_000)}, None, None)
    writer.write({"x": np.arange(11)}, None, None)
    writer.commit()
    assert [len(x) for x in TarSource(tmp_path).take(np.arange(2))["x"]] == [10, 11]


def test_arrays_may_have_any_length(tmp_path: Path) -> None:
    write(tmp_path, make=lambda n: {"x": np.full(n * 20_000, n)})
    found = TarSource(tmp_path).take(np.arange(7))["x"]
    assert [(len(x), set(x.tolist())) for x in found] == [(n * 20_000, {n} if n else set()) for n in range(7)]


@given(
    st.lists(st.tuples(st.integers(0, 70_000), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from(["none", "gz"]),
)
def test_written_samples_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, bool]], shard_size: int, compression: Any
) -> None:
    folder = tmp_path_factory.mktemp("set")
    writer = start_writer(folder, shard_size=shard_size, compression=compression)
    for number, (size, named) in enumerate(sizes):
        fields = {"x": np.full(size, number, np.uint8), "b": bytes([number]) * (size % 600), "n": number}
        writer.write(fields, f"id.{number}" if named else None, {"size": size})
    writer.commit()
    source = TarSource(folder)
    found = source.take(np.arange(len(sizes)))
    assert [(len(x), set(x.tolist())) for x in found["x"]] == [
        (size, {n} if size else set()) for n, (size, _) in enumerate(sizes)
    ]
    assert found["b"].tolist() == [bytes([n]) * (size % 600) for n, (size, _) in enumerate(sizes)]
    assert found["n"].tolist() == list(range(len(sizes)))
    assert [about["size"] for about in found["metadata"]] == [size for size, _ in sizes]


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shard_size": 0},
        {"shard_size": 2.5},
        {"max_shard_bytes": 10},
        {"max_shard_bytes": 4095},
        {"compression": "zip"},
        {"compression": None},
        {"array_format": "pickle"},
        {"metadata": {"a": float("nan")}},
        {"metadata": {1: 2}},
        {"shard_name_pattern": "always_the_same.tar"},
        {"shard_name_pattern": "shard_{shard_idx:06d}"},
        {"shard_name_pattern": "a/{shard_idx}.tar"},
        {"shard_name_pattern": "../{shard_idx}.tar"},
        {"shard_name_pattern": ".{shard_idx}.tar"},
        {"shard_name_pattern": "{}.tar"},
        {"shard_name_pattern": "{other}.tar"},
        {"shard_name_pattern": "{shard_idx"},
        {"shard_name_pattern": "{shard_idx:zz}.tar"},
        {"shard_name_pattern": "{shard_idx.__class__}.tar"},
        {"shard_name_pattern": "{shard_idx.real}.tar"},  # differs for all shards, but is no plain number
        {"shard_name_pattern": "{shard_idx:.0e}.tar"},  # is a plain number, but 999 999 and 1 000 000 become one
        {"shard_name_pattern": "a\0{shard_idx}.tar"},
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_anything_is_written(options: dict[str, Any], tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=name):
        WebDatasetWriter(tmp_path / "set", **options)
    assert not (tmp_path / "set").exists()


def test_by_default_a_thousand_samples_make_a_plain_shard_of_npy_members() -> None:
    assert asdict(WriteOptions()) == {
        "shard_size": 1000,
        "shard_name_pattern": "shard_{shard_idx:06d}.tar",
        "compression": "none",
        "array_format": "npy",
        "max_shard_bytes": None,
        "metadata": {},
        "layout": "samples",
    }
    assert WriteOptions().to_json().keys() == asdict(WriteOptions()).keys() - {"layout"}
    assert WriteOptions().most_tar_bytes is None


def test_compressed_shards_have_at_most_a_gigabyte_and_fewer_if_asked_for() -> None:
    assert WriteOptions(compression="gz").most_tar_bytes == 1 << 30
    assert WriteOptions(compression="gz", max_shard_bytes=1 << 31).most_tar_bytes == 1 << 30
    assert WriteOptions(compression="gz", max_shard_bytes=4096).most_tar_bytes == 4096
    assert WriteOptions(max_shard_bytes=1 << 31).most_tar_bytes == 1 << 31


def test_a_sample_that_fills_a_shard_exactly_is_written_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    # Two headers, a payload of 5 tar blocks, metadata of at most 2, and the end of 2.
    limit = 512 * (2 + 5 + 2 + 2)
    writer = start_writer(tmp_path, max_shard_bytes=limit)
    writer.write({"b": bytes(5 * 512)}, None, None)
    with pytest.raises(OptionError, match=f"a shard of {limit} bytes, but sample 1 needs {limit + 512}"):
        writer.write({"b": bytes(5 * 512 + 1)}, None, None)
    assert [shard.tar_bytes for shard in writer.commit().shards] == [limit - 512]  # its metadata need one block


def test_a_sample_that_still_fits_goes_into_the_open_shard(tmp_path: Path) -> None:
    # A sample takes 2 headers, 1 block and 1 of metadata, and is counted with one more; the end takes 2.
    writer = start_writer(tmp_path, shard_size=100, max_shard_bytes=512 * (2 * 4 + 1 + 2))
    for _ in range(5):
        writer.write({"b": b"abc"}, None, None)
    assert [shard.n_items for shard in writer.commit().shards] == [2, 2, 1]


def test_files_of_a_dataset_have_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("*.tar")} == {
        f"shard_{number:06d}.tar": "0o644" for number in range(3)
    }


# -- ending ------------------------------------------------------------------------------------------------------------


def test_without_samples_there_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no samples were written"), WebDatasetWriter(tmp_path):
        pass
    with pytest.raises(SourceError):
        TarSource(tmp_path)
    write(tmp_path, 2)
    assert numbers(tmp_path) == [0, 1]


def write_and_fail(folder: Path, n_samples: int) -> None:
    with WebDatasetWriter(folder, shard_size=3, overwrite=True) as writer:
        for number in range(n_samples):
            writer.write_sample(sample(10 + number))
        raise ZeroDivisionError


@pytest.mark.parametrize("n_samples", [0, 1, 5])
def test_an_exception_in_the_users_code_leaves_no_dataset(n_samples: int, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path, n_samples)
    with pytest.raises(SourceError, match="a writer has not finished there"):
        TarSource(tmp_path)
    assert open_files_in(tmp_path) == []
    assert not list(tmp_path.rglob("*.part"))


def test_an_exception_leaves_the_previous_dataset(tmp_path: Path) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path, 5)
    assert {name: content for name, content in contents(tmp_path).items() if ".writing" not in name} == before
    assert numbers(tmp_path) == list(range(7))


def test_finalize_is_idempotent_and_writing_after_it_is_refused(tmp_path: Path) -> None:
    writer = WebDatasetWriter(tmp_path)
    writer.write_sample(sample(0))
    assert writer.finalize() == writer.finalize()
    with pytest.raises(WriteError, match=r"Could not write a sample: .* is complete"):
        writer.write_sample(sample(1))
    assert numbers(tmp_path) == [0]


def test_an_abandoned_writer_is_unusable(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    writer.write(sample(0), None, None)
    writer.abandon()
    writer.abandon()
    with pytest.raises(WriteError, match="was abandoned"):
        writer.write(sample(1), None, None)
    with pytest.raises(WriteError, match="was abandoned"):
        writer.commit()


def test_a_dropped_writer_warns_and_releases_the_folder(tmp_path: Path) -> None:
    def begin_and_drop() -> None:
        writer = WebDatasetWriter(tmp_path)
        writer.write_sample(sample(0))
        del writer
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped without finalize"):
        begin_and_drop()
    assert open_files_in(tmp_path) == []
    write(tmp_path, 1)


def test_a_writer_that_never_started_does_not_warn(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="Could not open the folder"):
        WebDatasetWriter(tmp_path / "file")
    with pytest.raises(OptionError):
        WebDatasetWriter(tmp_path / "set", shard_size=0)
    gc.collect()


def test_nothing_is_left_open_after_the_end(tmp_path: Path) -> None:
    write(tmp_path)
    assert open_files_in(tmp_path) == []
