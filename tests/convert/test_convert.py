"""A whole conversion: every item of every input once, in its place, on any engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_convert_parts import Taped, mishap, read, rows, tapes, tree, visible

from penstock import TarSource
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.fingerprint import fingerprint
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.convert.to_shards import convert_to_shards
from penstock.core.errors import ConversionError, OptionError, SourceError, WriteError
from penstock.files.locks import FolderLock
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.verify import verify_shards

SIZES, NAMES = (7, 5, 9, 4), ("anna_1", "bert_1", "anna_2", "carl_1")
HALVES = (("train", 0.5), ("val", 0.5))
CASES: dict[str, ConvertOptions] = {
    "plain": ConvertOptions(WriteOptions(4)),
    "compressed": ConvertOptions(WriteOptions(4, compression="gz")),
    "by file": ConvertOptions(WriteOptions(4), Split(HALVES)),
    "by subject": ConvertOptions(WriteOptions(4), Split(HALVES, "subject")),
    "by time": ConvertOptions(WriteOptions(4), Split(HALVES, "time")),
}


@pytest.fixture
def inputs(tmp_path: Path) -> list[Taped]:
    return tapes(tmp_path / "in", SIZES, NAMES)


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5), shard_size=st.integers(1, 30))
@few_cases
def test_every_sample_is_there_once_in_the_order_of_the_inputs(
    sizes: list[int], shard_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("case")
    given = tapes(folder / "in", sizes)
    manifest = convert(given, folder / "out", ConvertOptions(WriteOptions(shard_size)))[""]
    assert read(folder / "out") == rows(given)
    whole, rest = divmod(sum(sizes), shard_size)
    assert [shard.n_items for shard in manifest.shards] == [shard_size] * whole + ([rest] if rest else [])
    assert verify_shards(folder / "out")[1] == []


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_do_not_depend_on_the_number_of_workers(case: str, inputs: list[Taped], tmp_path: Path) -> None:
    trees = []
    for workers in (1, 2, 4):
        convert(inputs, tmp_path / f"out{workers}", CASES[case], engine=LocalEngine(workers))
        trees.append(tree(tmp_path / f"out{workers}"))
    assert trees[0] == trees[1] == trees[2]
    assert not any(part.startswith(".") for name in trees[0] for part in Path(name).parts)


@pytest.mark.parametrize("case", ["by file", "by subject"])
def test_groups_are_whole_and_every_sample_is_on_one_side(case: str, inputs: list[Taped], tmp_path: Path) -> None:
    convert(inputs, tmp_path / "out", CASES[case])
    sides = {name: read(tmp_path / "out" / name) for name in ("train", "val")}
    assert sorted(sides["train"] + sides["val"]) == sorted(rows(inputs))
    of = (lambda file: file) if case == "by file" else (lambda file: file.partition("_")[0])
    groups = [{of(file) for file, _, _ in side} for side in sides.values()]
    assert not groups[0] & groups[1]


def test_stretches_of_time_share_no_row(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (40, 23), sequence_length=4, overlap=0.75)
    split = Split((("train", 0.7), ("val", 0.2), ("test", 0.1)), "time")
    convert(given, tmp_path / "out", ConvertOptions(WriteOptions(10), split))
    seen: dict[str, set[tuple[str, float]]] = {}
    for name in split.names:
        source = TarSource(tmp_path / "out" / name)
        block = source.take(np.arange(len(source.index)))
        seen[name] = {
            (about["file"], first)
            for about, window in zip(block["metadata"], block["data"], strict=True)
            for first in (-window[:, 2]).tolist()
        }
        source.close()
    assert not seen["train"] & seen["val"]
    assert not (seen["train"] | seen["val"]) & seen["test"]
    assert seen["train"] == {("tape_0.npy", row) for row in range(28)} | {("tape_1.npy", row) for row in range(16)}


def test_items_are_numbered_in_the_order_in_which_they_are_written(inputs: list[Taped], tmp_path: Path) -> None:
    convert(inputs, tmp_path / "out", CASES["plain"])
    source = TarSource(tmp_path / "out")
    about = source.take(np.arange(25))["metadata"]
    source.close()
    assert [entry["sample_id"] for entry in about] == [f"sample_{number:09d}" for number in range(25)]
    assert [(entry["shard_idx"], entry["sample_idx_in_shard"]) for entry in about] == [divmod(n, 4) for n in range(25)]


def test_the_manifest_says_where_everything_comes_from(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (7, 5, 9), ("anna_1", "bert_1", "anna_2"), sequence_length=2)
    options = ConvertOptions(WriteOptions(4, metadata={"lab": "ours"}), Split(HALVES, "subject"))
    manifests = convert(given, tmp_path / "out", options)
    anna = next(found for found in manifests.values() if len(found.metadata["conversion"]["inputs"]) == 2)
    about = anna.metadata["conversion"]
    assert anna.metadata["lab"] == "ours"
    assert [(entry["file"], entry["samples"]) for entry in about["inputs"]] == [("anna_1.npy", 3), ("anna_2.npy", 4)]
    assert [entry["digest"] for entry in about["inputs"]] == [fingerprint(given[0].path), fingerprint(given[2].path)]
    first = about["inputs"][0]
    assert first["bytes"] == given[0].path.stat().st_size
    assert first["groups"] == {"subject": "anna"}
    assert first["options"] == {"sequence_length": 2, "overlap": 0.0}
    assert first["notes"] == [
        "The last row is left out: the 7 rows do not end with a whole window.",
        "anna_1 was taped",
    ]
    assert first["about"]["format"] == "npy"
    assert about["skipped"] == []
    assert about["split"]["shares"] == {"train": 0.5, "val": 0.5}
    assert about["split"]["group_by"] == "subject"
    assert {found.metadata["conversion"]["split"]["name"] for found in manifests.values()} == {"train", "val"}
    assert about["versions"]["numpy"] == np.__version__
    assert Manifest.read(anna.folder / "dataset_metadata.json") == anna


def test_the_bytes_do_not_depend_on_where_inputs_lie(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        convert(tapes(tmp_path / place / "in", SIZES), tmp_path / place / "out", CASES["plain"])
    assert tree(tmp_path / "here" / "out") == tree(tmp_path / "there" / "out")


def test_one_sample_in_all_and_a_shard_that_is_larger(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (1,))
    convert(given, tmp_path / "out", ConvertOptions(WriteOptions(1000)), engine=LocalEngine(2))
    assert read(tmp_path / "out") == rows(given)


def test_progress_ends_with_the_total(inputs: list[Taped], tmp_path: Path) -> None:
    calls: list[tuple[str, str, int, int, str]] = []
    convert(inputs, tmp_path / "out", CASES["plain"], on_progress=lambda *call: calls.append(call))
    assert [call[2] for call in calls if call[0] == "Scanning"] == [0, 1, 2, 3, 4]
    assert [(call[2], call[3]) for call in calls if call[0] == "Writing"] == [
        (n, 25) for n in (0, 4, 8, 12, 16, 20, 24, 25)
    ]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_no_inputs_are_an_error_and_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="needs at least one input"):
        convert([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_bad_inputs_are_named_with_their_reasons_and_no_folder_is_left(inputs: list[Taped], tmp_path: Path) -> None:
    inputs[1].path.write_bytes(b"no array")
    inputs[3].path.unlink()
    with pytest.raises(ConversionError, match=r"2 inputs could not be converted, and nothing was published") as caught:
        convert(inputs, tmp_path / "out", ConvertOptions(split=Split(HALVES)), engine=LocalEngine(2))
    assert caught.value.reasons.keys() == {str(inputs[1].path), str(inputs[3].path)}
    assert caught.value.reasons[str(inputs[3].path)].startswith(f"Could not read {inputs[3].path}: ")
    assert all(reason in str(caught.value) for reason in caught.value.reasons.values())
    assert [str(caught.value).count(path) for path in caught.value.reasons] == [1, 1]
    assert not (tmp_path / "out").exists()


def test_inputs_whose_fields_differ_are_both_named(inputs: list[Taped], tmp_path: Path) -> None:
    np.save(inputs[2].path, np.zeros((4, 3)))
    with pytest.raises(SourceError, match=r"anna_2\.npy has .*float64.* and anna_1\.npy has .*float32"):
        convert(inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "reason"), [("dtype", "one dtype|float64"), ("field", "more")])
@pytest.mark.parametrize("at", [2, 4])  # in the middle of a shard, and where one begins
def test_items_that_differ_within_an_input_are_refused(kind: str, at: int, reason: str, tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (5,))
    mishap(given[0], kind, at, once=False)
    with pytest.raises(OptionError, match=reason):
        convert(given, tmp_path / "out", ConvertOptions(WriteOptions(4)))
    assert visible(tmp_path / "out") == set()


def test_a_split_by_a_group_that_an_input_lacks_is_refused(tmp_path: Path) -> None:
    given = [NpyInput(entry.path) for entry in tapes(tmp_path / "in", (3, 3))]
    with pytest.raises(SourceError, match=r"tape_0\.npy does not say which subject it belongs to"):
        convert(given, tmp_path / "out", CASES["by subject"])
    assert not (tmp_path / "out").exists()


def test_a_split_by_time_that_leaves_a_split_empty_is_refused(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (10,), sequence_length=6)
    with pytest.raises(SourceError, match="must have items, but 'train' has none"):
        convert(given, tmp_path / "out", CASES["by time"])
    assert not (tmp_path / "out").exists()


def test_shards_bounded_by_bytes_are_refused() -> None:
    with pytest.raises(OptionError, match="Use shard_size"):
        ConvertOptions(WriteOptions(max_shard_bytes=10_000))


def test_invalid_options_are_refused() -> None:
    bad: Any = "ignore"
    with pytest.raises(OptionError, match="on_bad"):
        ConvertOptions(on_bad=bad)


# -- what is there already ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "by file"])
def test_an_existing_dataset_is_not_touched_unless_asked_for(case: str, inputs: list[Taped], tmp_path: Path) -> None:
    convert(inputs, tmp_path / "out", CASES[case])
    before = tree(tmp_path / "out")
    with pytest.raises(WriteError, match="Replace it with overwrite=True"):
        convert(inputs[:2], tmp_path / "out", CASES[case])
    assert tree(tmp_path / "out") == before
    convert(inputs[:2], tmp_path / "out", CASES[case], existing="overwrite")
    convert(inputs[:2], tmp_path / "new", CASES[case])
    assert tree(tmp_path / "out") == tree(tmp_path / "new")


@pytest.mark.parametrize("case", CASES)
def test_resuming_what_is_complete_returns_it_and_reads_no_sample(
    case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    first = convert(inputs, tmp_path / "out", CASES[case])
    before = tree(tmp_path / "out")
    for entry in inputs:
        mishap(entry, "read", 1, once=False)
    assert convert(inputs, tmp_path / "out", CASES[case], existing="resume") == first
    assert tree(tmp_path / "out") == before


OTHER: dict[str, Callable[[ConvertOptions], ConvertOptions]] = {
    "shard size": lambda options: replace(options, write=WriteOptions(5)),
    "compression": lambda options: replace(options, write=replace(options.write, compression="xz")),
    "metadata": lambda options: replace(options, write=replace(options.write, metadata={"a": 1})),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("case", ["plain"])
@pytest.mark.parametrize("finished", [True, False])
def test_resuming_with_other_options_is_refused_and_changes_nothing(
    finished: bool, case: str, other: str, inputs: list[Taped], tmp_path: Path
) -> None:
    if not finished:
        mishap(inputs[2], "read", 3)
    try:
        convert(inputs, tmp_path / "out", CASES[case])
    except ConversionError:
        assert not finished
    before = tree(tmp_path / "out")
    with pytest.raises(OptionError, match=r"needs the same inputs and options"):
        convert(inputs, tmp_path / "out", OTHER[other](CASES[case]), existing="resume")
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("finished", [True, False])
def test_resuming_with_other_inputs_is_refused(finished: bool, inputs: list[Taped], tmp_path: Path) -> None:
    if not finished:
        mishap(inputs[2], "read", 3)
    try:
        convert(inputs, tmp_path / "out", CASES["plain"])
    except ConversionError:
        assert not finished
    before = tree(tmp_path / "out")
    np.save(inputs[3].path, np.load(inputs[3].path) + 1)
    for others in (inputs, inputs[:3], inputs[::-1]):
        with pytest.raises(OptionError, match="needs the same inputs and options"):
            convert(others, tmp_path / "out", CASES["plain"], existing="resume")
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["conversion", "identity"])
def test_names_in_metadata_that_a_conversion_sets_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"metadata must not have the names .* got {name}"):
        ConvertOptions(WriteOptions(metadata={"subject": "m1", name: 1}))


def test_resuming_and_overwriting_exclude_each_other(inputs: list[Taped], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="At most one of resume and overwrite"):
        convert_to_shards(inputs, tmp_path / "out", resume=True, overwrite=True)
    assert not (tmp_path / "out").exists()


def test_resuming_without_an_unfinished_conversion_starts_one(inputs: list[Taped], tmp_path: Path) -> None:
    convert(inputs, tmp_path / "out", CASES["plain"], existing="resume")
    assert read(tmp_path / "out") == rows(inputs)


@pytest.mark.parametrize("how", [{}, {"existing": "resume"}, {"existing": "overwrite"}])
def test_a_second_conversion_into_the_same_folder_is_refused(
    how: dict[str, Any], inputs: list[Taped], tmp_path: Path
) -> None:
    lock = FolderLock(tmp_path / "out")
    try:
        with pytest.raises(WriteError, match="Another writer is at work"):
            convert(inputs, tmp_path / "out", CASES["by file"], **how)
    finally:
        lock.release()
    assert tree(tmp_path / "out") == {}


def test_folders_that_were_there_and_empty_may_be_used(inputs: list[Taped], tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    convert(inputs, tmp_path / "out", CASES["by file"])
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_conversion_at_work_keeps_others_out(inputs: list[Taped], tmp_path: Path) -> None:
    refused: list[object] = []

    def meanwhile(*call: object) -> None:
        if call[0] == "Writing":
            with pytest.raises(WriteError, match="Another writer is at work"):
                convert(inputs, tmp_path / "out", CASES["plain"], existing="resume")
            refused.append(call)

    convert(inputs, tmp_path / "out", CASES["plain"], on_progress=meanwhile)
    assert len(refused) == 8
    assert read(tmp_path / "out") == rows(inputs)
