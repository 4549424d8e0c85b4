"""Writing: the same bytes each time, all or nothing, and nobody else's files."""

import gc
import io
import json
import os
import resource
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_test_parts import isolated

from penstock import TarSource, WebDatasetWriter, create_shards_from_arrays
from penstock.core.errors import OptionError, PenstockError, SourceError, WriteError
from penstock.shard.manifest import MANIFEST
from penstock.shard.writer import ShardWriter, WriteOptions
from tests.shard.samples import contents, sample, write

NOBODY = 65534


def metadata(folder: Path) -> list[dict[str, Any]]:
    return TarSource(folder, fields=["metadata"]).take(np.arange(len(TarSource(folder).index)))["metadata"].tolist()


def ids(folder: Path) -> list[str]:
    return [about["sample_id"] for about in metadata(folder)]


def numbers(folder: Path) -> list[int]:
    source = TarSource(folder)
    return source.take(np.arange(len(source.index)))["x"][:, 0].tolist()


def begun(folder: Path, **options: Any) -> ShardWriter:
    return ShardWriter(folder, WriteOptions(**{"shard_size": 3, **options}))


def open_files() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(entry.readlink()))
        except OSError:
            continue  # the handle that lists the folder
    return found


def held(folder: Path) -> list[str]:
    return sorted(name for name in open_files() if name.startswith(str(folder)))


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
def test_shards_have_so_many_samples(shard_size: int, sizes: list[int], tmp_path: Path) -> None:
    assert [shard.n_items for shard in write(tmp_path, shard_size=shard_size).shards] == sizes
    assert numbers(tmp_path) == list(range(7))
    places = [(about["shard_idx"], about["sample_idx_in_shard"]) for about in metadata(tmp_path)]
    assert places == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("limit", [4608 + 512, 7000, 10_000, 14_848, 20_000, 10**6])
def test_no_shard_is_larger_than_asked_for(limit: int, compression: Any, tmp_path: Path) -> None:
    manifest = write(tmp_path, 20, shard_size=100, max_shard_bytes=limit, compression=compression)
    assert all(shard.tar_bytes <= limit for shard in manifest.shards)
    assert all((tmp_path / shard.name).stat().st_size == shard.stored_bytes for shard in manifest.shards)
    assert numbers(tmp_path) == list(range(20))
    # No shard ends much earlier than it must: another sample and a block of doubt would not have fitted.
    one = 6 * 512 + 512
    assert all(shard.tar_bytes + one > limit for shard in manifest.shards[:-1])


def test_a_sample_larger_than_a_shard_may_be_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    writer = begun(tmp_path, max_shard_bytes=8192)
    writer.write({"x": np.arange(10)}, None, None)
    with pytest.raises(OptionError, match=r"Sample 1 takes \d+ bytes, a shard 8192 at most; raise max_shard_bytes"):
        writer.write({"x": np.arange(10_000)}, None, None)
    writer.write({"x": np.arange(11)}, None, None)
    writer.commit()
    assert [len(x) for x in TarSource(tmp_path).take(np.arange(2))["x"]] == [10, 11]


def test_arrays_of_any_length_are_taken(tmp_path: Path) -> None:
    write(tmp_path, make=lambda n: {"x": np.full(n * 20_000, n)})
    found = TarSource(tmp_path).take(np.arange(7))["x"]
    assert [(len(x), set(x.tolist())) for x in found] == [(n * 20_000, {n} if n else set()) for n in range(7)]


@settings(max_examples=300 if os.environ.get("PENSTOCK_SOAK") == "1" else 30)
@given(
    st.lists(st.tuples(st.integers(0, 70_000), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from(["none", "gz"]),
)
def test_whatever_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, bool]], shard_size: int, compression: Any
) -> None:
    folder = tmp_path_factory.mktemp("set")
    writer = begun(folder, shard_size=shard_size, compression=compression)
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


# -- ids, fields and metadata ------------------------------------------------------------------------------------------

STRANGE = [
    "sub-01.ses-2",
    "sub-01",
    "sub-01%2Eses-2",
    "a/b",
    "a\\b",
    "..",
    ".",
    "../../etc/passwd",
    "é",
    "e\u0301",
    "A",
    "a",
    " ",
    "日本",
    "x\ny",
    "sample_1",
]


def test_strange_ids_come_back_and_are_not_merged(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    for number, one in enumerate(STRANGE):
        writer.write(sample(number), one, None)
    writer.commit()
    assert ids(tmp_path) == STRANGE
    with tarfile.open(tmp_path / "shard_000000.tar") as tar:
        assert all("/" not in name and not name.startswith(".") for name in tar.getnames())


@pytest.mark.parametrize("when", [1, 4])
def test_an_id_twice_is_refused(when: int, tmp_path: Path) -> None:
    writer = begun(tmp_path)
    for number in range(6):
        if number == when:
            writer.write(sample(number), "one", None)
        else:
            writer.write(sample(number), None, None)
    with pytest.raises(OptionError, match="Sample 6 has the id 'one', as one before it"):
        writer.write(sample(6), "one", None)
    with pytest.raises(OptionError, match="as one before it"):
        writer.write(sample(6), "sample_000000000", None)
    writer.write(sample(6), None, None)
    writer.commit()
    assert len(set(ids(tmp_path))) == 7


def test_an_id_of_the_users_own_that_equals_a_number_to_come_is_noticed(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.write(sample(0), "sample_000000002", None)
    writer.write(sample(1), None, None)
    with pytest.raises(OptionError, match="as one before it"):
        writer.write(sample(2), None, None)
    writer.write(sample(2), "another", None)
    writer.commit()
    assert ids(tmp_path) == ["sample_000000002", "sample_000000001", "another"]


def test_an_id_from_before_a_resume_is_remembered(tmp_path: Path) -> None:
    first = begun(tmp_path, shard_size=2)
    first.write(sample(0), "sample_000000003", None)
    first.write(sample(1), None, None)
    first.abandon()
    second = ShardWriter(tmp_path, WriteOptions(shard_size=2), resume=True)
    assert second.written == 2
    second.write(sample(2), None, None)
    with pytest.raises(OptionError, match="as one before it"):
        second.write(sample(3), None, None)
    with pytest.raises(OptionError, match="as one before it"):
        second.write(sample(3), "sample_000000003", None)
    second.abandon()


@pytest.mark.parametrize("sample_id", ["", 7, b"a", "\ud800"])
def test_what_is_no_id_is_refused(sample_id: Any, tmp_path: Path) -> None:
    writer = begun(tmp_path)
    with pytest.raises(OptionError, match="sample_id="):
        writer.write(sample(0), sample_id, None)
    writer.abandon()


def test_the_users_metadata_do_not_overwrite_the_writers(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    given = {"sample_id": "wrong", "modalities": [], "shard_idx": 99, "sample_idx_in_shard": 99, "trial": {"side": "é"}}
    writer.write(sample(0), "right", given)
    writer.commit()
    (about,) = metadata(tmp_path)
    assert about == {
        "sample_id": "right",
        "modalities": ["x", "note"],
        "shard_idx": 0,
        "sample_idx_in_shard": 0,
        "trial": {"side": "é"},
    }


@pytest.mark.parametrize("value", [{"a": "\0place\0"}, {"\0place\0": 1}, {"a": '","shard_idx":7,"b":"'}])
def test_metadata_are_kept_whatever_they_contain(value: dict[str, Any], tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.write(sample(0), "\0place\0", value)
    writer.commit()
    (about,) = metadata(tmp_path)
    assert about == {
        "sample_id": "\0place\0",
        "modalities": ["x", "note"],
        "shard_idx": 0,
        "sample_idx_in_shard": 0,
        **value,
    }


REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "no dict": ([1, 2], None, None, "give a dict"),
    "nothing": ({}, None, None, "at least one field"),
    "None": (None, None, None, "give a dict"),
    "a field less": ({"x": np.zeros(2, np.int32)}, None, None, r"lacks \['note'\]"),
    "a field more": ({**sample(1), "y": 1}, None, None, r"has \['y'\]"),
    "another dtype": ({"x": np.zeros(2), "note": "a"}, None, None, "'x' of sample 1 is float64, but int32"),
    "another kind": ({"x": "text", "note": "a"}, None, None, "'x' of sample 1 is txt"),
    "array for text": ({"x": np.zeros(2, np.int32), "note": np.zeros(2)}, None, None, "'note' of sample 1 is float64"),
    "objects": ({"x": np.array([None]), "note": "a"}, None, None, "Python objects"),
    "metadata of objects": (sample(1), None, {"a": object()}, "JSON holds"),
    "metadata of NaN": (sample(1), None, {"a": float("nan")}, "is nan"),
    "metadata of numbers": (sample(1), None, {7: 1}, "has the key 7"),
    "metadata that is none": (sample(1), None, [1], "is no dict"),
    "text that is none": ({**sample(1), "note": "\ud800"}, None, None, "'note'"),
    "an id of 200 letters": (sample(1), "i" * 200, None, "a tar header holds 100"),
    "an id that is none": (sample(1), 7, None, "sample_id=7"),
    "an id twice": (sample(1), "sample_000000000", None, "as one before it"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_refused_sample_leaves_no_trace(kind: str, place: int, tmp_path: Path) -> None:
    bad, bad_id, about, match = REFUSED[kind]
    for folder in ("with", "without"):
        writer = begun(tmp_path / folder)
        for number in range(5):
            if (
                number == place
                and folder == "with"
                and (
                    place
                    or kind
                    not in (
                        "a field less",
                        "a field more",
                        "another dtype",
                        "another kind",
                        "array for text",
                        "an id twice",
                    )
                )
            ):
                with pytest.raises(OptionError, match=match.replace("sample 1", f"sample {place}")):
                    writer.write(bad, bad_id, about)
                assert writer.written == place
            writer.write(sample(number), None, None)
        writer.commit()
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_a_sample_that_is_refused_at_the_end_of_a_shard_does_not_end_it(tmp_path: Path) -> None:
    for folder in ("with", "without"):
        writer = begun(tmp_path / folder, shard_size=100, max_shard_bytes=3 * 3584 + 1024)
        for number in range(4):
            # Large enough that it would need another shard, and refused for its name.
            if number == 1 and folder == "with":
                with pytest.raises(OptionError, match="a tar header holds 100"):
                    writer.write({"x": np.zeros(800, np.int32), "note": "a" * 4000}, "i" * 200, None)
            writer.write(sample(number), None, None)
        writer.commit()
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_a_refused_sample_leaves_no_file_open(tmp_path: Path) -> None:
    writer = begun(tmp_path, shard_size=1)
    writer.write(sample(0), None, None)
    with pytest.raises(OptionError):
        writer.write(sample(1), "i" * 200, None)
    writer.commit()
    assert held(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"x": 1, "X": 2}, "differ in case only"),
        ({"metadata": 1}, "is taken"),
        ({"Metadata": 1}, "(is taken|differ in case)"),
        ({"a/b": 1}, "slash"),
        ({"__key__": "a"}, "is taken"),
        ({7: 1}, "cannot name a field"),
        ({"f" * 90: 1}, "a tar header holds 100"),
    ],
)
def test_fields_that_would_be_mistaken_are_refused(fields: Any, match: str, tmp_path: Path) -> None:
    writer = begun(tmp_path)
    with pytest.raises(OptionError, match=match):
        writer.write(fields, None, None)
    writer.write(sample(0), None, None)
    writer.commit()
    assert numbers(tmp_path) == [0]


def test_fields_with_dots_and_unicode_come_back(tmp_path: Path) -> None:
    fields = {"lfp.left": 1, "é": 2.5, "x.npy": "text", "json": [1], "a b": b"\0"}
    writer = begun(tmp_path)
    writer.write(fields, None, None)
    writer.commit()
    source = TarSource(tmp_path)
    assert set(source.fields) == {*fields, "metadata"}
    found = source.take(np.array([0]))
    assert {name: found[name][0] for name in fields} == fields


def test_fields_may_come_in_another_order(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.write({"x": 1, "y": 2}, None, None)
    writer.write({"y": 20, "x": 10}, None, None)
    writer.commit()
    found = TarSource(tmp_path).take(np.arange(2))
    assert (found["x"].tolist(), found["y"].tolist()) == ([1, 10], [2, 20])


def test_a_row_of_a_tensor_is_stored_alone(tmp_path: Path) -> None:
    rows = torch.arange(100_000).reshape(1000, 100)
    for array_format in ("npy", "pyd"):
        write(tmp_path / array_format, 3, make=lambda n: {"x": rows[n]}, array_format=array_format)
        assert (tmp_path / array_format / "shard_000000.tar").stat().st_size < 3 * (4 * 512 + 1024) + 2048


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shard_size": 0},
        {"shard_size": 2.5},
        {"max_shard_bytes": 10},
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
        {"shard_name_pattern": "a\0{shard_idx}.tar"},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_before_anything_is_touched(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=name):
        WebDatasetWriter(tmp_path / "set", **options)
    assert not (tmp_path / "set").exists()


# -- ending ------------------------------------------------------------------------------------------------------------


def test_without_samples_there_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No samples were written"), WebDatasetWriter(tmp_path):
        pass
    with pytest.raises(SourceError):
        TarSource(tmp_path)
    write(tmp_path, 2)
    assert numbers(tmp_path) == [0, 1]


def write_and_fail(folder: Path, n_samples: int) -> None:
    with WebDatasetWriter(folder, shard_size=3) as writer:
        for number in range(n_samples):
            writer.write_sample(sample(10 + number))
        raise ZeroDivisionError


@pytest.mark.parametrize("n_samples", [0, 1, 5])
def test_an_exception_in_the_users_code_leaves_no_data_set(n_samples: int, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path, n_samples)
    with pytest.raises(SourceError, match="a writer has not finished there"):
        TarSource(tmp_path)
    assert held(tmp_path) == []
    assert not list(tmp_path.rglob("*.part"))


def test_an_exception_leaves_the_data_set_that_was_there(tmp_path: Path) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path, 5)
    assert {name: content for name, content in contents(tmp_path).items() if ".writing" not in name} == before
    assert numbers(tmp_path) == list(range(7))


def test_finishing_twice_is_fine_and_writing_after_it_is_not(tmp_path: Path) -> None:
    writer = WebDatasetWriter(tmp_path)
    writer.write_sample(sample(0))
    assert writer.finalize() == writer.finalize()
    with pytest.raises(WriteError, match="is complete; nothing more can be written"):
        writer.write_sample(sample(1))
    assert numbers(tmp_path) == [0]


def test_after_it_was_abandoned_a_writer_is_of_no_use(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.write(sample(0), None, None)
    writer.abandon()
    writer.abandon()
    with pytest.raises(WriteError, match="was abandoned"):
        writer.write(sample(1), None, None)
    with pytest.raises(WriteError, match="was abandoned"):
        writer.commit()


def test_a_writer_that_is_dropped_warns_and_lets_go(tmp_path: Path) -> None:
    def begin_and_drop() -> None:
        writer = WebDatasetWriter(tmp_path)
        writer.write_sample(sample(0))
        del writer
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped without finalize"):
        begin_and_drop()
    assert held(tmp_path) == []
    write(tmp_path, 1)


def test_a_writer_that_never_began_does_not_warn(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="Could not open the folder"):
        WebDatasetWriter(tmp_path / "file")
    with pytest.raises(OptionError):
        WebDatasetWriter(tmp_path / "set", shard_size=0)
    gc.collect()


def test_nothing_is_left_open_after_the_end(tmp_path: Path) -> None:
    write(tmp_path)
    assert held(tmp_path) == []


# -- what is there already ---------------------------------------------------------------------------------------------


@pytest.fixture
def others(tmp_path: Path) -> dict[str, bytes]:
    """Put other people's files into the folder."""
    files = {
        "notes.txt": b"mine",
        "shard_000009.tar": b"not yours",
        "other.tar": b"mine",
        "other.tar.index": b"mine",
        "shard_000099.tar.index": b"mine",
        "sub/shard_000000.tar": b"mine",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return files


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_size": 7},
        {"shard_size": 1},
        {"shard_name_pattern": "train_{shard_idx:02d}.tar"},
        {"compression": "gz"},
    ],
    ids=str,
)
def test_rewriting_leaves_no_stale_shard_and_nobody_elses_file_touched(
    options: dict[str, Any], others: dict[str, bytes], tmp_path: Path
) -> None:
    write(tmp_path, 7)
    write(tmp_path, 5, make=lambda n: sample(100 + n), **options)
    write(tmp_path / "fresh", 5, make=lambda n: sample(100 + n), **options)
    fresh = contents(tmp_path / "fresh")
    found = {name: content for name, content in contents(tmp_path).items() if not name.startswith("fresh")}
    assert found == {**fresh, **others}
    assert numbers(tmp_path) == [100, 101, 102, 103, 104]


def test_a_manifest_of_others_does_not_make_the_writer_remove_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_bytes(b"three years")
    foreign = {"total_samples": 1, "shards": [{"shard_name": "thesis.txt"}]}
    (tmp_path / MANIFEST).write_text(json.dumps(foreign))
    write(tmp_path, 2)
    assert (tmp_path / "thesis.txt").read_bytes() == b"three years"
    assert numbers(tmp_path) == [0, 1]


def test_the_old_data_set_is_readable_until_the_new_one_is_there(tmp_path: Path) -> None:
    write(tmp_path, 7)
    writer = begun(tmp_path)
    for number in range(5):
        writer.write(sample(100 + number), None, None)
        assert numbers(tmp_path) == list(range(7))
    writer.commit()
    assert numbers(tmp_path) == [100, 101, 102, 103, 104]


def test_replacing_a_data_set_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 7)
    assert not caplog.messages
    write(tmp_path, 2)
    assert [message for message in caplog.messages if "data set of 7 samples" in message]


# -- two writers -------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.write(sample(0), None, None)
    for resume in (False, True):
        with pytest.raises(WriteError, match="Another writer is at work"):
            ShardWriter(tmp_path, WriteOptions(), resume=resume)
    first.write(sample(1), None, None)
    first.commit()
    assert numbers(tmp_path) == [0, 1]
    write(tmp_path, 1)
    assert numbers(tmp_path) == [0]


def test_a_second_writer_in_another_process_is_refused(tmp_path: Path) -> None:
    first = begun(tmp_path)
    assert isolated(outcome_of_writing, tmp_path) == "Another writer"
    first.abandon()
    assert isolated(outcome_of_writing, tmp_path) == "written"


def outcome_of_writing(folder: Path) -> str:
    try:
        write(folder, 2)
    except WriteError as error:
        return str(error)[:14]
    return "written"


def test_a_child_process_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.write(sample(0), None, None)
    waiting, telling = os.pipe()
    pid = os.fork()
    if not pid:  # a worker process that was forked while the writer was open, and lives on
        os.close(telling)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    try:
        writer.commit()
        write(tmp_path, 2)
    finally:
        os.close(telling)
        os.waitpid(pid, 0)
    assert numbers(tmp_path) == [0, 1]


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "xz"])
@pytest.mark.parametrize("stopped", range(9))
def test_resuming_ends_in_the_same_bytes(stopped: int, compression: Any, tmp_path: Path) -> None:
    write(tmp_path / "whole", 8, compression=compression)
    writer = begun(tmp_path / "set", compression=compression)
    for number in range(stopped):
        writer.write(sample(number), None, {"number": number})
    writer.abandon()
    resumed = ShardWriter(tmp_path / "set", WriteOptions(3, compression=compression), resume=True)
    assert resumed.written == stopped // 3 * 3
    resumed.abandon()
    write(tmp_path / "set", 8, resume=True, compression=compression)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_resuming_an_empty_folder_starts_at_the_beginning(tmp_path: Path) -> None:
    write(tmp_path / "one", resume=True)
    write(tmp_path / "other")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_resuming_a_complete_data_set_does_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    writer = WebDatasetWriter(tmp_path, shard_size=3, resume=True)
    assert writer.written == 7
    assert writer.finalize()["total_samples"] == 7
    with pytest.raises(WriteError, match="is complete"):
        writer.write_sample(sample(7))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "other",
    [
        {"shard_size": 4},
        {"compression": "gz"},
        {"array_format": "pyd"},
        {"max_shard_bytes": 10**6},
        {"metadata": {"a": 1}},
        {"shard_name_pattern": "t{shard_idx}.tar"},
    ],
    ids=str,
)
def test_resuming_with_other_options_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    writer = begun(tmp_path)
    for number in range(4):
        writer.write(sample(number), None, None)
    writer.abandon()
    before = contents(tmp_path)
    with pytest.raises(OptionError, match="Use the same options"):
        ShardWriter(tmp_path, WriteOptions(**{"shard_size": 3, **other}), resume=True)
    assert contents(tmp_path) == before
    write(tmp_path, resume=True)
    assert numbers(tmp_path) == list(range(7))


def test_resuming_with_other_fields_is_refused(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    for number in range(4):
        writer.write(sample(number), None, None)
    writer.abandon()
    resumed = ShardWriter(tmp_path, WriteOptions(3), resume=True)
    for bad in ({"x": np.zeros(2, np.int32)}, {"x": np.zeros(2), "note": "a"}, {"x": "a", "note": "a"}):
        with pytest.raises(OptionError, match=r"(Sample|sample) 3"):
            resumed.write(bad, None, None)
    resumed.abandon()


def test_starting_anew_forgets_what_was_unfinished(tmp_path: Path) -> None:
    writer = begun(tmp_path, shard_size=1)
    for number in range(4):
        writer.write(sample(50 + number), None, None)
    writer.abandon()
    write(tmp_path, 2)
    write(tmp_path / "fresh", 2)
    found = {name: content for name, content in contents(tmp_path).items() if not name.startswith("fresh")}
    assert found == contents(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["shard_000001.tar", "shard_000001.tar.index"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_a_finished_shard_that_was_damaged_meanwhile_is_written_again_or_refused(
    name: str, damage: str, tmp_path: Path
) -> None:
    write(tmp_path / "whole", 8, shard_size=2)
    writer = begun(tmp_path / "set", shard_size=2)
    for number in range(7):
        writer.write(sample(number), None, {"number": number})
    writer.abandon()
    path = tmp_path / "set" / ".writing" / name
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-10])
    elif damage == "missing":
        path.unlink()
    else:
        content[600 if name.endswith(".tar") else 100] ^= 1
        path.write_bytes(content)
    try:
        write(tmp_path / "set", 8, resume=True, shard_size=2)
        found = numbers(tmp_path / "set")
    except PenstockError:
        return  # a flipped bit is found when it is read, at the latest
    assert found == list(range(8))
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_rows_of_arrays_go_on_where_they_stopped(tmp_path: Path) -> None:
    arrays = {"x": np.arange(20).reshape(10, 2), "y": np.arange(10.0)}
    create_shards_from_arrays(tmp_path / "whole", arrays, shard_size=3, show_progress=False)
    writer = WebDatasetWriter(tmp_path / "set", shard_size=3)
    for number in range(5):
        writer.write_sample({name: array[number] for name, array in arrays.items()})
    writer._writer.abandon()
    create_shards_from_arrays(tmp_path / "set", arrays, shard_size=3, resume=True, show_progress=False)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


# -- disks that are full, or not ours ----------------------------------------------------------------------------------


def big(number: int) -> dict[str, Any]:
    return {"x": np.full(3000, number, np.int32)}


def written_within(folder: Path, limit: int, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Write where no file may have more than `limit` bytes; return the error and what is still open."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(folder, 8, make=big, **options)
    except WriteError as error:
        return str(error), held(folder)
    return "written", held(folder)


@pytest.mark.parametrize("compression", ["none", "bz2"])
@pytest.mark.parametrize("shard_size", [1, 3])
def test_a_full_disk_in_the_middle_of_a_shard_is_an_error_that_can_be_mended(
    shard_size: int, compression: Any, tmp_path: Path
) -> None:
    options = {"shard_size": shard_size, "compression": compression}
    write(tmp_path / "whole", 8, make=big, **options)
    smallest = min(path.stat().st_size for path in (tmp_path / "whole").glob("*.tar"))
    error, still_open = isolated(written_within, tmp_path / "set", smallest - 100, options)
    assert "Could not write to" in error
    assert "resume=True" in error
    assert still_open == []
    with pytest.raises(SourceError, match="a writer has not finished there"):
        TarSource(tmp_path / "set")
    write(tmp_path / "set", 8, make=big, resume=True, **options)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_a_full_disk_at_a_large_payload_leaves_nothing_open(tmp_path: Path) -> None:
    """Large payloads are written at once, small ones when the shard is closed."""
    error, still_open = isolated(written_within, tmp_path, 4096, {"shard_size": 8})
    assert "Could not write" in error
    assert still_open == []
    assert not list(tmp_path.rglob("*.part"))


def many_small_shards_within(folder: Path, limit: int) -> tuple[str, list[str]]:
    """Write shards of three kilobytes, so many that the manifest is the largest file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(folder, 40, make=lambda n: {"x": np.array([n, n], np.int32)}, shard_size=1)
    except WriteError as error:
        return str(error), held(folder)
    return "written", held(folder)


def test_a_full_disk_at_the_manifest_leaves_what_was_there(tmp_path: Path) -> None:
    assert isolated(many_small_shards_within, tmp_path / "whole", 10**6) == ("written", [])
    sizes = sorted((path.stat().st_size, path.name) for path in (tmp_path / "whole").iterdir())
    assert sizes[-1][1] == MANIFEST
    write(tmp_path / "set", 7)
    error, still_open = isolated(many_small_shards_within, tmp_path / "set", sizes[-1][0] - 1)
    assert "Could not write" in error
    assert "resume=True" in error
    assert still_open == []
    assert numbers(tmp_path / "set") == list(range(7))
    assert list((tmp_path / "set").rglob("*.aside")) == []
    writer = ShardWriter(tmp_path / "set", WriteOptions(shard_size=1), resume=True)
    assert writer.written == 40
    writer.commit()
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_a_full_disk_at_the_very_beginning_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "set", 7)
    options = {"shard_size": 1, "metadata": {"text": "x" * 200_000}}
    error, still_open = isolated(written_within, tmp_path / "set", 100_000, options)
    assert "Could not write" in error
    assert still_open == []
    assert numbers(tmp_path / "set") == list(range(7))
    write(tmp_path / "whole", 8, make=big, **options)
    write(tmp_path / "set", 8, make=big, **options)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def written_by_nobody(folder: Path) -> str:
    if not os.getuid():
        os.setuid(NOBODY)
    try:
        WebDatasetWriter(folder)
    except WriteError as error:
        return str(error)
    return "written"


def test_a_folder_that_may_not_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o555)
    folder = tmp_path / "set"
    folder.mkdir()
    folder.chmod(0o555)
    for target in (folder, folder / "below"):
        error = isolated(written_by_nobody, target)
        assert str(folder) in error
        assert "Permission denied" in error
    assert contents(folder) == {}


def test_a_folder_that_vanishes_is_an_error(tmp_path: Path) -> None:
    writer = begun(tmp_path / "set", shard_size=2)
    writer.write(sample(0), None, None)
    for path in sorted((tmp_path / "set").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "set").rmdir()
    with pytest.raises(WriteError, match="Could not write"):
        writer.write(sample(1), None, None)
    with pytest.raises(WriteError, match="has failed"):
        writer.write(sample(2), None, None)
    assert not (tmp_path / "set").exists()
