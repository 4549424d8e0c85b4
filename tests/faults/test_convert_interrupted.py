"""A conversion is interrupted, or an input fails: nothing is published, and resuming gives the same bytes."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import zarr
from penstock_cases import some_cases
from penstock_convert_parts import OddError, Taped, has_happened, mend, mishap, read, rows, tapes, tree, visible

from penstock import TarSource
from penstock.cli.where import check_dataset
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.fingerprint import fingerprint
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.inputs.audio import AudioInput
from penstock.convert.inputs.protocol import Input
from penstock.convert.inputs.zarr import ZarrInput
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.core.errors import ConversionError, OptionError, SourceError, WriteError
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.outputs.local import LocalPlace
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.summary import find_problems

SIZES, NAMES = (4, 6, 4), ("anna_1", "bert_1", "anna_2")
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


class InterruptAt:
    """A progress callback that raises KeyboardInterrupt the n-th time."""

    def __init__(self, last: int) -> None:
        self.count, self.last = 0, last

    def __call__(self, *news: object) -> None:
        self.count += 1
        if self.count == self.last:
            raise KeyboardInterrupt


@some_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_interrupted_after_any_shard_it_resumes_to_the_same_bytes(
    case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    count = InterruptAt(-1)
    convert(inputs, tmp_path / "whole", CASES[case], on_progress=count)
    whole = tree(tmp_path / "whole")
    for at in range(1, count.count + 1):
        out, workers = tmp_path / f"out{at}", 1 + (at % 7 == 0)
        with pytest.raises(KeyboardInterrupt):
            convert(inputs, out, CASES[case], on_progress=InterruptAt(at), engine=LocalEngine(workers))
        assert visible(out) == set(), f"interrupted at {at}"
        convert(inputs, out, CASES[case], existing="resume" if out.exists() else "refuse")
        assert tree(out) == whole, f"interrupted at {at}"


@some_cases(2)
@pytest.mark.parametrize(("case", "workers"), [("plain", 1), ("plain", 2), ("by file", 2)])
def test_an_input_that_fails_in_the_middle_is_named_and_when_mended_goes_on(
    case: str, workers: int, inputs: list[Taped], tmp_path: Path
) -> None:
    convert(inputs, tmp_path / "whole", CASES[case])
    for number, at in ((0, 1), (1, 5), (2, 3)):
        out = tmp_path / f"out{number}"
        mishap(inputs[number], "read", at)
        with pytest.raises(ConversionError, match=f"the tape of {NAMES[number]} is torn") as caught:
            convert(inputs, out, CASES[case], engine=LocalEngine(workers))
        assert caught.value.reasons == {str(inputs[number].path): f"the tape of {NAMES[number]} is torn"}
        assert visible(out) == set()
        with pytest.raises(WriteError, match="unfinished conversion"):
            convert(inputs, out, CASES[case])
        convert(inputs, out, CASES[case], engine=LocalEngine(workers), existing="resume")
        assert tree(out) == tree(tmp_path / "whole")


def test_what_was_finished_is_not_read_again(inputs: list[Taped], tmp_path: Path) -> None:
    mishap(inputs[2], "read", 3)
    with pytest.raises(ConversionError):
        convert(inputs, tmp_path / "out", CASES["plain"])
    mishap(inputs[0], "read", 1)
    convert(inputs, tmp_path / "out", CASES["plain"], existing="resume")
    assert not has_happened(inputs[0])
    assert read(tmp_path / "out") == rows(inputs)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("kind", "error"), [("value", ValueError), ("interrupt", KeyboardInterrupt), ("odd", None)])
def test_an_error_of_the_inputs_own_code_publishes_nothing(
    kind: str, error: Any, workers: int, inputs: list[Taped], tmp_path: Path
) -> None:
    if error is None:
        error = OddError if workers == 1 else Exception
    mishap(inputs[1], kind, 4)
    with pytest.raises(error):
        convert(inputs, tmp_path / "out", CASES["plain"], engine=LocalEngine(workers))
    assert visible(tmp_path / "out") == set()
    convert(inputs, tmp_path / "out", CASES["plain"], existing="resume")
    assert read(tmp_path / "out") == rows(inputs)


@some_cases(3)
@pytest.mark.parametrize("case", ["plain"])
@pytest.mark.parametrize("kind", ["grow", "rewrite"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_input_that_changes_during_the_conversion_is_an_error(
    workers: int, kind: str, case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    mishap(inputs[1], kind, 5)
    with pytest.raises(ConversionError, match=r"bert_1\.npy: the file changed while it was converted"):
        convert(inputs, tmp_path / "out", CASES[case], engine=LocalEngine(workers))
    assert visible(tmp_path / "out") == set()
    before = tree(tmp_path / "out")
    with pytest.raises(OptionError, match=r"was started with others\. Use the same, or start again with overwrite"):
        convert(inputs, tmp_path / "out", CASES[case], existing="resume")
    assert tree(tmp_path / "out") == before, "nothing is lost"
    convert(inputs, tmp_path / "out", CASES[case], existing="overwrite")
    assert sorted(read(tmp_path / "out")) == sorted(rows(inputs))


def write_recording(folder: Path, kind: str) -> tuple[Input, Path]:
    """Write a recording whose values no digest covers; return its input, and the file that holds row 5."""
    if kind == "zarr":
        zarr.create_array(folder / "a.zarr", data=np.arange(12).reshape(6, 2), chunks=(1, 2))
        return ZarrInput(folder / "a.zarr"), folder / "a.zarr" / "c" / "5" / "0"
    np.save(folder / "a.npy", np.zeros((6, 1_500_000), np.int64))  # 72 MB
    return NpyInput(folder / "a.npy"), folder / "a.npy"


def change_value(path: Path, kind: str) -> None:
    if kind == "zarr":
        zarr.open(path.parents[2], mode="r+")[5] = 7
    else:
        with path.open("r+b") as file:
            # In row 5, behind one of the 64 slices of 1 MB that are digested.
            file.seek((path.stat().st_size - (1 << 20)) * 54 // 63 + (1 << 20) + 1000)
            file.write(b"7")


@pytest.mark.parametrize("kind", ["zarr", "large"])
def test_values_that_change_before_a_conversion_is_resumed_or_while_it_runs_are_not_mixed(
    kind: str, tmp_path: Path
) -> None:
    given, path = write_recording(tmp_path, kind)
    options, before = ConvertOptions(WriteOptions(2)), fingerprint(given.path)
    with pytest.raises(KeyboardInterrupt):
        convert([given], tmp_path / "out", options, on_progress=InterruptAt(5))
    change_value(path, kind)
    assert fingerprint(given.path) == before, "the content that is digested has not changed"
    with pytest.raises(OptionError, match=r"started with others: files of a\.\w+ had another size or time\."):
        convert([given], tmp_path / "out", options, existing="resume")

    def change(phase: str, _: str, done: int, *__: object) -> None:
        if done == 2 and phase == "Writing":
            change_value(path, kind)

    with pytest.raises(ConversionError, match="changed while it was converted"):
        convert([given], tmp_path / "out", options, existing="overwrite", on_progress=change)
    assert visible(tmp_path / "out") == set()
    convert([given], tmp_path / "out", options, existing="overwrite")


def test_killed_between_two_parts_of_a_split_the_other_is_named_and_resuming_ends_it(
    inputs: list[Taped], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "out", CASES["by file"]
    convert(inputs, tmp_path / "whole", options)
    finish = LocalPlace.finish

    def die_at_val(place: LocalPlace, shard_name: Any) -> None:
        if place.where.name == "val":
            raise KeyboardInterrupt
        finish(place, shard_name)

    monkeypatch.setattr(LocalPlace, "finish", die_at_val)
    with pytest.raises(KeyboardInterrupt):
        convert(inputs, out, options)
    monkeypatch.undo()
    (problem,) = find_problems(Manifest.read(out / "train" / MANIFEST))
    assert problem == "val of the same split was not published: convert again with --resume"
    with pytest.raises(SourceError, match=r"such as .*train\. Not published yet: val; convert again with resume=True"):
        TarSource(out)
    with pytest.raises(SourceError, match=r"contains train\. Give .*train Not published yet: val; run"):
        check_dataset(str(out))
    with pytest.raises(SourceError, match=r"a writer has not finished there. Run it again with resume=True"):
        TarSource(out / "val")
    convert(inputs, out, options, existing="resume")
    assert tree(out) == tree(tmp_path / "whole")
    assert find_problems(Manifest.read(out / "train" / MANIFEST)) == []


@pytest.mark.parametrize("case", ["by file", "by subject"])
def test_where_one_of_several_splits_cannot_be_made_ready_none_appears(
    case: str, inputs: list[Taped], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = LocalPlace.prepare

    def full_for_val(place: LocalPlace, manifest: Manifest) -> None:
        if manifest.folder.name == "val":
            raise WriteError("No space left on device")
        prepare(place, manifest)

    convert(inputs, tmp_path / "whole", CASES[case])
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "prepare", full_for_val)
        for existing in ("refuse", "resume"):
            with pytest.raises(WriteError, match="No space left"):
                convert(inputs, out, CASES[case], existing=existing)
            assert visible(out) == set()
    convert(inputs, out, CASES[case], existing="resume")
    assert tree(out) == tree(tmp_path / "whole")


# -- inputs that are skipped ------------------------------------------------------------------------------------------


def without_skipped(folder: Path) -> dict[str, Any]:
    """Return all files; manifests without the list of skipped inputs and the checksum over it."""
    found: dict[str, Any] = dict(tree(folder))
    for name in [name for name in found if name.endswith("dataset_metadata.json")]:
        manifest = json.loads(found[name])
        manifest["metadata"]["conversion"].pop("skipped")
        manifest.pop("checksum")
        found[name] = manifest
    return found


def read_skipped(folder: Path) -> list[tuple[str, str]]:
    manifest = json.loads((folder / "dataset_metadata.json").read_bytes())
    return [(entry["file"], entry["reason"]) for entry in manifest["metadata"]["conversion"]["skipped"]]


@some_cases(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("when", ["looked at", "read"])
def test_a_run_that_skips_is_one_that_never_had_the_bad_input(
    when: str, case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    options = replace(CASES[case], on_bad="skip")
    bad, good = inputs[0], [*inputs[1:], *tapes(tmp_path / "more", (3,), ("carl_1",))]
    convert(good, tmp_path / "without", options)
    mishap(bad, "read", 0 if when == "looked at" else 3, once=False)
    manifests = convert([bad, *good], tmp_path / "with", options, engine=LocalEngine(2))
    assert without_skipped(tmp_path / "with") == without_skipped(tmp_path / "without")
    for manifest in manifests.values():
        assert read_skipped(manifest.folder) == [("anna_1.npy", "the tape of anna_1 is torn")]


def test_all_inputs_bad_is_an_error_even_where_bad_ones_are_skipped(inputs: list[Taped], tmp_path: Path) -> None:
    for number, given in enumerate(inputs):
        mishap(given, "read", number, once=False)
    with pytest.raises(ConversionError, match="3 inputs could not be converted"):
        convert(inputs, tmp_path / "out", replace(CASES["plain"], on_bad="skip"))
    assert visible(tmp_path / "out") == set()


@pytest.mark.parametrize("case", ["plain"])
def test_a_run_that_skipped_an_input_while_reading_can_be_resumed(
    case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    options = replace(CASES[case], on_bad="skip")
    mishap(inputs[2], "read", 3, once=False)
    count = InterruptAt(-1)
    convert(inputs, tmp_path / "whole", options, on_progress=count)
    whole = tree(tmp_path / "whole")
    for at in range(count.count, 0, -2):
        out = tmp_path / f"out{at}"
        with pytest.raises(KeyboardInterrupt):
            convert(inputs, out, options, on_progress=InterruptAt(at))
        convert(inputs, out, options, existing="resume")
        assert tree(out) == whole, f"interrupted at {at}"
    mend(inputs[2])
    assert convert(inputs, out, options, existing="resume").keys() == set(options.split.names)
    assert tree(out) == whole, "what is complete stays as it is"


def test_inputs_of_equal_names_and_without_items_do_not_hinder_resuming(tmp_path: Path) -> None:
    folders = [tapes(tmp_path / name, (4, 4), ("anna_1", "bert_1")) for name in ("monday", "tuesday")]
    soundfile.write(tmp_path / "short.wav", np.zeros(10), 8000)
    empty: Input = AudioInput(tmp_path / "short.wav", min_seconds=1)
    given, options = [*folders[0], *folders[1], empty], replace(CASES["plain"], on_bad="skip")
    mishap(folders[1][0], "read", 3, once=False)  # one of two anna_1.npy
    count = InterruptAt(-1)
    convert(given, tmp_path / "whole", options, on_progress=count)
    assert [file for file, _, _ in read(tmp_path / "whole")].count("anna_1.npy") == 4
    assert [file for file, _ in read_skipped(tmp_path / "whole")] == ["short.wav", "anna_1.npy"]
    with pytest.raises(KeyboardInterrupt):
        convert(given, tmp_path / "out", options, on_progress=InterruptAt(count.count - 1))
    for _ in range(2):  # the second one finds it complete
        convert(given, tmp_path / "out", options, existing="resume")
        assert tree(tmp_path / "out") == tree(tmp_path / "whole")


# -- what lies in the folder -------------------------------------------------------------------------------------------


@some_cases(5)
@pytest.mark.parametrize("case", ["plain", "by file"])
@pytest.mark.parametrize("damage", ["shard", "index", "part"])
def test_partial_files_of_a_power_cut_are_written_again(
    damage: str, case: str, inputs: list[Taped], tmp_path: Path
) -> None:
    count = InterruptAt(-1)
    convert(inputs, tmp_path / "whole", CASES[case], on_progress=count)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):  # before the last shard
        convert(inputs, out, CASES[case], on_progress=InterruptAt(count.count - 1))
    name = {"shard": "*.tar", "index": "*.index", "part": "*.tar"}[damage]
    path = sorted(out.rglob(f".writing/{name}"))[0]
    if damage == "part":
        path.with_name(f"{path.name}.host-1.part").write_bytes(path.read_bytes())
    else:
        path.write_bytes(path.read_bytes()[:-1])
    convert(inputs, out, CASES[case], existing="resume")
    assert tree(out) == tree(tmp_path / "whole")


def test_an_unfinished_conversion_is_forgotten_where_that_is_asked_for(inputs: list[Taped], tmp_path: Path) -> None:
    out, given = tmp_path / "out", tapes(tmp_path / "other", (4, 4))
    mishap(inputs[2], "read", 3)
    with pytest.raises(ConversionError):
        convert(inputs, out, CASES["plain"])
    with pytest.raises(WriteError, match="unfinished conversion"):
        convert(given, out, CASES["plain"])
    convert(given, out, CASES["plain"], existing="overwrite")
    convert(given, tmp_path / "whole", CASES["plain"])
    assert tree(out) == tree(tmp_path / "whole")


def test_files_are_closed_after_an_error(inputs: list[Taped], tmp_path: Path) -> None:
    mishap(inputs[1], "read", 5)
    gc.collect()  # files of other tests
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConversionError):
        convert(inputs, tmp_path / "out", CASES["plain"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    convert(inputs, tmp_path / "out", CASES["plain"], existing="resume")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    source = TarSource(tmp_path / "out")
    assert source.take(np.arange(3))["data"].shape == (3, 3)
    source.close()
