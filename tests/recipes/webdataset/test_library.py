"""The webdataset library reads what we write, and we read what it writes: every value, bit for bit."""

import io
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_source_suite import same
from penstock_webdataset_library import consumed, read_by_the_library, tars

from penstock import Loader, Plan, Shuffle, Span, TarSource, create_webdataset_dataloader
from penstock.recipes.webdataset import WebDatasetLoader, WebDatasetWriter
from penstock.shard.index_tars import index_archives

N, SHARD = 23, 5


# -- ours, read by the library -----------------------------------------------------------------------------------------


def our_sample(i: int) -> dict[str, Any]:
    return {
        "spikes": (np.arange(12, dtype=np.float32).reshape(4, 3) + i),
        "events": np.arange(i % 4, dtype=np.int64) * i,
        "label": np.int32(i),
        "when": np.datetime64(i, "s"),
        "flag": bool(i % 2),
        "note": f"item {i} — ä",
        "trial": {"n": i, "list": [1, None, "x"]},
        "lfp.left": np.full(2, i, np.float16),
    }


def test_the_library_reads_columns_as_blocks(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path, SHARD, layout="columns") as writer:
        for i in range(N):
            writer.write_sample(our_sample(i), metadata={"trial_id": i})
    found = read_by_the_library(tars(tmp_path))
    assert [block["__key__"] for block in found] == ["block_000000"] * len(tars(tmp_path))
    for name in ("spikes", "label", "flag", "lfp.left"):
        blocks = [block[f"{name}.npy"] for block in found]
        assert same(np.concatenate(blocks), np.stack([np.asarray(our_sample(i)[name]) for i in range(N)])), name
    # The library leaves what begins with two underscores as bytes.
    about = [np.load(io.BytesIO(block["__metadata.trial_id.npy"])) for block in found]
    assert np.concatenate(about).tolist() == list(range(N))
    text, ends = found[1]["note.txt.npy"].tobytes(), np.load(io.BytesIO(found[1]["__offsets.note.txt.npy"]))
    assert text[ends[2] : ends[3]].decode() == our_sample(SHARD + 2)["note"]


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
@pytest.mark.parametrize("compression", ["none", "gz", "bz2", "xz"])
def test_the_library_reads_our_shards_bit_for_bit(tmp_path: Path, compression: str, array_format: str) -> None:
    with WebDatasetWriter(tmp_path, SHARD, compression=compression, array_format=array_format) as writer:
        for i in range(N):
            writer.write_sample(our_sample(i), metadata={"trial_id": i})
    found = read_by_the_library(tars(tmp_path))
    assert len(found) == N
    suffixes = {"note": "txt", "trial": "json"}
    for i, sample in enumerate(found):
        assert sample["__key__"] == f"sample_{i:09d}"
        fields = {name: value for name, value in sample.items() if not name.startswith("__")}
        wanted = {f"{name}.{suffixes.get(name, array_format)}": value for name, value in our_sample(i).items()}
        assert fields.pop("metadata.json")["trial_id"] == i
        assert list(fields) == list(wanted)
        for name, value in wanted.items():
            array = np.asarray(value) if not isinstance(value, str | dict) else value
            assert same(fields[name], array), name


@pytest.mark.parametrize("sample_id", ["sub-01.ses-1", "a/b", "ünit 1", "100%", ".hidden"])
def test_the_library_keeps_our_ids_apart(tmp_path: Path, sample_id: str) -> None:
    ids = [sample_id, sample_id + ".x", sample_id + "/x", "other"]
    with WebDatasetWriter(tmp_path) as writer:
        for number, name in enumerate(ids):
            writer.write_sample({"x": np.int64(number), "y": np.int64(-number)}, sample_id=name)
    found = read_by_the_library(tars(tmp_path))
    assert [int(sample["x.npy"]) for sample in found] == [0, 1, 2, 3]
    assert [int(sample["y.npy"]) for sample in found] == [0, -1, -2, -3]
    assert [sample["metadata.json"]["sample_id"] for sample in found] == ids
    assert len({sample["__key__"] for sample in found}) == 4


def test_the_libraries_own_shuffled_pipeline_reads_our_shards(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path, SHARD) as writer:
        for i in range(N):
            writer.write_sample({"x": np.int64(i), "y": np.full(3, i, np.float32)})
    batches = consumed(
        lambda: (
            wds.WebDataset([str(path) for path in tars(tmp_path)], shardshuffle=False)
            .shuffle(10, initial=5)
            .decode()
            .to_tuple("x.npy", "y.npy", "metadata.json")
            .batched(4)
        )
    )
    assert sorted(int(x) for batch in batches for x in batch[0]) == list(range(N))
    assert all((np.asarray(batch[1])[:, 0] == np.asarray(batch[0])).all() for batch in batches)


_values = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["f4", "i2", "u1", "?", "c8"]).map(lambda dtype: np.arange(6).reshape(2, 3).astype(dtype)),
)


@few_cases  # the library leaves so much behind that every example collects garbage
@given(sample=st.dictionaries(st.sampled_from("abcdef"), _values, min_size=1), n=st.integers(1, 5))
def test_any_sample_is_the_same_to_both(
    tmp_path_factory: pytest.TempPathFactory, sample: dict[str, Any], n: int
) -> None:
    folder = tmp_path_factory.mktemp("both")
    with WebDatasetWriter(folder, shard_size=2) as writer:
        for _ in range(n):
            writer.write_sample(sample)
    source = TarSource(folder)
    ours = source.take(np.arange(n))
    theirs = read_by_the_library(tars(folder))
    assert len(theirs) == n
    for row in range(n):
        for name in sample:
            suffix = source.manifest.fields[name].suffix
            array = ours[name]
            value = array[row] if array.dtype.hasobject else array[row : row + 1].reshape(array.shape[1:])
            assert same(value, theirs[row][suffix])
    source.close()


# -- the library's, read by us -----------------------------------------------------------------------------------------


def image(i: int, channels: int = 3) -> np.ndarray:
    values = np.arange(8 * 6 * channels).reshape((8, 6, channels) if channels > 1 else (8, 6))
    return ((values + i) % 256).astype(np.uint8)


def their_sample(i: int) -> dict[str, Any]:
    return {
        "__key__": f"sess/rec{i:05d}",
        "spikes.npy": np.arange(12, dtype=np.float32).reshape(4, 3) + i,
        "cls": i,
        "json": {"n": i, "list": [1, None, "x"]},
        "png": image(i),
        "gray.png": image(i, 1),
        "jpg": image(i),
        "txt": f"item {i}",
        "state.pyd": {"a": np.arange(i % 3), "b": [i, "x"], "c": (1.5, None)},
        "ragged.npy": np.arange(i % 4),
        "raw.bin": bytes([i % 256]) * i,
    }


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that has the library write 23 samples once, plain or as .tar.gz."""
    made: dict[str, Path] = {}

    def written(kind: str) -> Path:
        if kind not in made:
            folder = made[kind] = tmp_path_factory.mktemp("theirs")
            pattern = str(folder / f"train-%06d.{'tar.gz' if kind == 'gz' else 'tar'}")
            with wds.ShardWriter(pattern, maxcount=SHARD, verbose=0) as writer:
                for i in range(N):
                    writer.write(their_sample(i))
            manifest, problems = index_archives(folder)
            assert problems == []
            assert manifest is not None
        return made[kind]

    return written


def as_they_decode(folder: Path) -> list[dict[str, Any]]:
    """Return the library's samples, by our names: suffixes that we decode lose their extension, if they have a name."""
    names = {"spikes.npy": "spikes", "state.pyd": "state", "ragged.npy": "ragged", "raw.bin": "raw"}
    # Gray images stay gray with us; the library makes of them what it is told to.
    color = read_by_the_library(tars(folder), "rgb8")
    gray = read_by_the_library(tars(folder), "l8")
    found = []
    for left, right in zip(color, gray, strict=True):
        sample = {names.get(name, name): value for name, value in left.items() if not name.startswith("__")}
        found.append({**sample, "gray.png": right["gray.png"]})
    return found


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_their_shards_are_read_bit_for_bit_as_they_decode_them(theirs: Callable[[str], Path], kind: str) -> None:
    folder = theirs(kind)
    wanted = as_they_decode(folder)
    source = TarSource(folder)
    assert len(source.index) == len(wanted) == N
    assert set(source.fields) == set(wanted[0])
    block = source.read(Span(0, N))
    for item in range(N):
        for name, value in wanted[item].items():
            assert same(block[name][item], value), f"{name} of item {item}"
    source.close()


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_any_item_of_theirs_can_be_taken_at_any_time(theirs: Callable[[str], Path], kind: str) -> None:
    source, wanted = TarSource(theirs(kind)), as_they_decode(theirs(kind))
    rng = np.random.default_rng(0)
    for _ in range(5):
        items = rng.integers(0, N, 7)
        block = source.take(items)
        for row, item in enumerate(items.tolist()):
            assert all(same(block[name][row], value) for name, value in wanted[item].items())
    source.close()


def test_a_field_of_theirs_that_is_uniform_is_an_array_and_others_are_objects(theirs: Callable[[str], Path]) -> None:
    fields = TarSource(theirs("plain")).fields
    assert (fields["spikes"].dtype, fields["spikes"].shape) == (np.float32, (4, 3))
    assert {name for name, field in fields.items() if field.item_bytes is not None} == {"spikes"}


@pytest.mark.parametrize("kind", ["plain", "gz"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_theirs_is_every_sample_once_and_resumes_exactly(
    theirs: Callable[[str], Path], kind: str, workers: int
) -> None:
    def loader() -> Loader:
        return create_webdataset_dataloader(
            theirs(kind), batch_size=4, num_workers=workers, fields=["cls", "spikes", "txt"], buffer_size=8
        )

    with loader() as whole:
        assert len(whole) == 6
        epochs = [[batch["cls"].tolist() for batch in whole] for _ in range(2)]
    for epoch in epochs:
        assert sorted(x for batch in epoch for x in batch) == list(range(N))
    assert epochs[0] != epochs[1]
    for k in range(7):
        with loader() as first:
            batches = iter(first)
            seen = [batch["cls"].tolist() for batch in islice(batches, k)]
            state = json.loads(json.dumps(first.state_dict()))
        with loader() as second:
            second.load_state_dict(state)
            rest = [batch["cls"].tolist() for batch in second]
        assert seen + rest == epochs[0]


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_their_samples_through_our_loader_one_by_one(theirs: Callable[[str], Path], kind: str) -> None:
    loader = WebDatasetLoader(theirs(kind))
    assert len(loader) == N
    seen = []
    for sample in loader:
        item = int(sample["cls"])
        seen.append(item)
        assert sample["json"]["n"] == item
        assert sample["spikes"].tolist() == (np.arange(12, dtype=np.float32).reshape(4, 3) + item).tolist()
        assert sample["png"].numpy().tobytes() == image(item).tobytes()
        assert sample["txt"] == f"item {item}"
    assert sorted(seen) == list(range(N))
    loader.close()


def test_a_state_of_theirs_survives_indexing_again(theirs: Callable[[str], Path]) -> None:
    folder = theirs("plain")
    source = TarSource(folder)
    plan = Plan(source.index, Shuffle(), batch_size=4, tail="short")
    before = {path.name: path.read_bytes() for path in tars(folder)}
    manifest, problems = index_archives(folder, workers=2)
    assert (problems, manifest.fingerprint) == ([], source.manifest.fingerprint)
    assert Plan(TarSource(folder).index, Shuffle(), batch_size=4, tail="short").identity() == plan.identity()
    assert {path.name: path.read_bytes() for path in tars(folder)} == before


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gz"])
def test_a_single_archive_of_their_tar_writer(tmp_path: Path, compress: bool) -> None:
    path = tmp_path / ("one.tar.gz" if compress else "one.tar")
    with wds.TarWriter(str(path), compress=compress) as writer:
        for i in range(7):
            writer.write({"__key__": f"k{i}", "x.npy": np.full(3, i), "cls": i})
    manifest, problems = index_archives(path)
    assert (problems, manifest.n_items) == ([], 7)
    source = TarSource(path)
    assert source.take(np.array([6, 0]))["x"].tolist() == [[6, 6, 6], [0, 0, 0]]
    assert source.take(np.array([6, 0]))["cls"].tolist() == [6, 0]
    source.close()


def test_a_brace_pattern_of_theirs(theirs: Callable[[str], Path]) -> None:
    pattern = theirs("plain") / "train-{000001..000003}.tar"
    manifest, problems = index_archives(pattern)
    assert (problems, manifest.n_items) == ([], 15)
    loader = WebDatasetLoader(pattern)
    assert sorted(int(sample["cls"]) for sample in loader) == list(range(5, 20))
    loader.close()


def test_what_the_library_would_merge_or_drop_is_reported(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "one", "cls": 1, "txt": "a"})
        writer.write({"__key__": "two", "cls": 2})
        writer.write({"__key__": "one", "json": {}})
    manifest, problems = index_archives(tmp_path)
    assert manifest is None
    reasons = " | ".join(map(str, problems))
    assert "'one' are interleaved" in reasons
    assert "has no .txt" in reasons
