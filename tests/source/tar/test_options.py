"""Options, paths and chunks of TarSource, and its repr."""

import json
from pathlib import Path

import numpy as np
import pytest
from penstock_test_shards import Sample, archive, index_folder, member_places, npy, uniform, write

from penstock import Index, OptionError, ReadError, SourceError, Span, TarSource
from penstock.recipes.webdataset import create_shards_from_arrays
from penstock.source import Take


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 items of x, y and metadata, in shards of 5."""
    path = tmp_path_factory.mktemp("data") / "set"
    write(path, uniform(0), shard_size=5)
    return path


def test_fields_come_in_the_requested_order(folder: Path) -> None:
    for names in (["y", "x"], ["metadata", "y"], ["x"]):
        source = TarSource(folder, fields=names)
        assert list(source.fields) == list(source.take(np.array([3, 1]))) == names
    assert list(TarSource(folder).fields) == ["x", "y", "metadata"]


def test_metadata_that_take_nothing_in_columns_are_small(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"x": np.arange(4000)}, layout="columns", show_progress=False)
    assert TarSource(tmp_path).fields["metadata"].typical_bytes == 64


def test_a_field_of_varying_size_has_a_typical_size(folder: Path, tmp_path: Path) -> None:
    # An item is a header and a block for each of x, y and metadata; x holds 8 bytes, y 24.
    fields = TarSource(folder).fields
    assert {name: (field.item_bytes, field.typical_bytes) for name, field in fields.items()} == {
        "x": (8, None),
        "y": (24, None),
        "metadata": (None, pytest.approx(3 * 1024 - 32, abs=2560)),  # and the end of each archive
    }
    stored = TarSource(folder, decode=False).fields
    assert (stored["x"].item_bytes, stored["x"].typical_bytes) == (None, 8)
    archive(tmp_path / "a.tar", [{"png": b"no image", "txt": b"text"}] * 4)
    index_folder(tmp_path)
    assert TarSource(tmp_path).fields["png"].typical_bytes is None  # what an image takes is not known before
    assert TarSource(tmp_path).fields["txt"].typical_bytes >= 512
    assert TarSource(tmp_path, decode=False).fields["png"].typical_bytes >= 512


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fields": ["z"]}, SourceError, r"fields must be names of \['x', 'y', 'metadata'\], got 'z'"),
        ({"fields": "x"}, OptionError, "fields must be a list of names.*got 'x'"),
        ({"fields": []}, OptionError, r"fields must be a list of names.*got \[\]"),
        ({"verify": "sometimes"}, OptionError, "verify must be one of 'first', 'always', 'never', got 'sometimes'"),
        ({"on_error": "ignore"}, OptionError, "on_error must be one of 'raise', 'substitute', got 'ignore'"),
        ({"chunk_items": 0}, OptionError, "chunk_items must be an integer >= 1, got 0"),
        ({"chunk_items": 2.5}, OptionError, r"chunk_items must be an integer >= 1, got 2\.5"),
        ({"on_error": "substitute", "max_bad_items": -1}, OptionError, "max_bad_items must be an integer >= 0, got -1"),
    ],
)
def test_an_invalid_option_raises_an_error_that_says_what_is_allowed(
    folder: Path, options: Sample, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TarSource(folder, **options)


def test_a_folder_without_shards_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"No shards found: the folder .* does not exist"):
        TarSource(tmp_path / "nowhere" / "set.json")
    with pytest.raises(SourceError, match="No shards found"):
        TarSource(tmp_path)


def test_archives_without_an_index_say_how_to_get_one(tmp_path: Path) -> None:
    archive(tmp_path / "a.tar", [{"x.npy": npy(np.int64(1))}])
    with pytest.raises(SourceError, match="penstock index"):
        TarSource(tmp_path)


def test_the_repr_names_the_folder_the_items_and_the_fields(folder: Path) -> None:
    assert repr(TarSource(folder)) == f"TarSource({str(folder)!r}, 23 items of x, y, metadata)"


def test_shard_of_says_where_an_item_lies(folder: Path) -> None:
    source = TarSource(folder)
    assert [source.shard_of(item) for item in (0, 4, 5, 22)] == [(0, 0), (0, 4), (1, 0), (4, 2)]


@pytest.mark.parametrize("chunk_items", [1, 2, 3, 5, 99])
def test_chunks_cut_shards_evenly_and_never_cross_one(folder: Path, chunk_items: int) -> None:
    index = TarSource(folder, chunk_items=chunk_items).index
    sizes = index.chunk_sizes(np.arange(index.n_chunks)).tolist()
    borders = set(np.cumsum(sizes).tolist())
    assert max(sizes) <= chunk_items
    assert {5, 10, 15, 20, 23} <= borders
    pieces = -(-5 // chunk_items)
    assert len(sizes) == 4 * pieces + -(-3 // chunk_items)
    whole = sizes[:pieces]
    assert max(whole) - min(whole) <= 1
    assert sizes[: 4 * pieces] == whole * 4


def test_without_a_chunk_size_chunks_are_shards(folder: Path) -> None:
    index = TarSource(folder).index
    assert index.chunk_sizes(np.arange(index.n_chunks)).tolist() == [5, 5, 5, 5, 3]


def test_compressed_shards_are_always_one_chunk(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=5, compression="gz")
    index = TarSource(tmp_path / "set", chunk_items=2).index
    assert index.chunk_sizes(np.arange(index.n_chunks)).tolist() == [5, 5, 5, 5, 3]


def test_the_identity_depends_on_the_chunks_but_not_on_the_path(folder: Path, tmp_path: Path) -> None:
    assert TarSource(folder, chunk_items=2).index.digest != TarSource(folder).index.digest
    write(tmp_path / "elsewhere", uniform(0), shard_size=5)
    assert TarSource(tmp_path / "elsewhere").index.digest == TarSource(folder).index.digest


def test_a_dataset_that_was_moved_has_the_same_identity(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=5)
    source = TarSource(tmp_path / "set")
    before = source.take(np.arange(23))
    source.close()
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = TarSource(tmp_path / "moved")
    assert moved.index.digest == source.index.digest
    assert moved.take(np.arange(23))["y"].tobytes() == before["y"].tobytes()


def test_a_relative_path_is_resolved_when_the_source_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "set", uniform(0), shard_size=5)
    monkeypatch.chdir(tmp_path)
    source = TarSource("set")
    source.take(np.array([0]))
    monkeypatch.chdir("/")
    assert source.take(np.array([22]))["x"].tolist() == [22]
    source.close()
    assert source.take(np.array([1]))["x"].tolist() == [1]


def test_a_pattern_names_the_archives_it_was_indexed_with(tmp_path: Path) -> None:
    for number in range(3):
        archive(tmp_path / f"train-{number:03d}.tar", [{"cls": b"%d" % (number * 2 + k)} for k in range(2)], number * 2)
    for pattern, items in ((tmp_path / "train-{000..001}.tar", 4), (tmp_path / "train-{001,002}.tar", 4)):
        index_folder(pattern)
        source = TarSource(pattern)
        assert len(source.index) == items
    assert source.take(np.arange(4))["cls"].tolist() == [2, 3, 4, 5]


def test_selecting_by_mask_keeps_the_chunks_of_the_shards(folder: Path) -> None:
    source = TarSource(folder)
    part = Take(source, np.arange(23) % 2 == 0)
    assert part.index.chunk_sizes(np.arange(part.index.n_chunks)).tolist() == [3, 2, 3, 2, 2]
    assert part.read(Span(0, 12))["x"].tolist() == list(range(0, 23, 2))
    assert isinstance(part.index, Index)


def test_the_metadata_of_a_sample_is_its_own_json(folder: Path) -> None:
    (shard, *_) = sorted(folder.glob("*.tar"))
    offset, size = member_places(shard)["sample_000000003.metadata.json"]
    stored = json.loads(shard.read_bytes()[offset : offset + size])
    assert TarSource(folder, fields=["metadata"]).take(np.array([3]))["metadata"][0] == stored


def test_reading_past_the_end_names_the_items_and_the_dataset(folder: Path) -> None:
    with pytest.raises(ReadError, match=rf"items 20–29 of TarSource\({str(folder)!r}.*it has items 0–22"):
        TarSource(folder).read(Span(20, 30))
