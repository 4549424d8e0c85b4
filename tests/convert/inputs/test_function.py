"""Items that a function yields: which ones, how often it is called, and what happens if it yields others."""

import functools
import itertools
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import TarSource, convert_to_shards
from penstock.convert.fingerprint import digest_input, stamp_input
from penstock.convert.inputs.function import FunctionInput
from penstock.core.errors import ConversionError, OptionError, ReadError, SourceError

RUNS: list[list[int]] = []
"""The items that each call of the function has yielded."""


@pytest.fixture(autouse=True)
def _forget() -> None:
    RUNS.clear()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    run: list[int] = []
    RUNS.append(run)
    for number, line in enumerate(path.read_text().split()):
        run.append(number)
        yield {"value": np.array([float(line), number])}


def pairs(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for number, sample in enumerate(lines(path)):
        yield sample, {"subject": f"s{number}", "file": "another"} if number == 1 else {}


def scaled(path: Path, *, factor: float) -> list[dict[str, Any]]:
    return [{"value": sample["value"] * factor} for sample in lines(path)]


def failing(path: Path, *, after: int, runs: int = 0) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(lines(path)):
        if number == after and len(RUNS) > runs:
            raise KeyError("user's own")
        yield sample


def counting(path: Path, *, numbers: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yields another number of items in each call."""
    yield from itertools.islice(lines(path), numbers[min(len(RUNS), len(numbers) - 1)])


def renaming(path: Path) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(lines(path)):
        yield {"other": sample["value"]} if number == 3 and len(RUNS) > 1 else sample


def odd(path: Path, *, sample: Any) -> list[Any]:
    return [{"x": 1}, sample]


def nothing(path: Path) -> list[Any]:
    return []


def no_iterator(path: Path) -> Any:
    return 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(" ".join(str(number * number) for number in range(10)))
    return tmp_path / "a.txt"


def test_samples_are_what_the_function_yields(path, all_samples):
    for number, (fields, metadata) in enumerate(all_samples(FunctionInput(path, lines))):
        np.testing.assert_array_equal(fields["value"], [number * number, number])
        assert metadata == {"file": "a.txt", "row": number}


def test_metadata_of_the_function_are_added(path, all_samples):
    found = [metadata for _, metadata in all_samples(FunctionInput(path, pairs))]
    assert found[0] == {"file": "a.txt", "row": 0}
    assert found[1] == {"file": "another", "row": 1, "subject": "s1"}


def test_what_the_function_needs_is_given_with_partial(path, all_samples):
    given_input = FunctionInput(path, functools.partial(scaled, factor=2.0))
    assert [fields["value"][1] for fields, _ in all_samples(given_input)] == [2.0 * number for number in range(10)]
    assert repr(given_input).endswith("scaled(factor=2.0))")
    assert repr(given_input) != repr(FunctionInput(path, functools.partial(scaled, factor=3.0)))


def test_items_in_order_cost_two_calls_even_if_read_in_several_steps(path):
    recording = FunctionInput(path, lines).open()
    for start in range(0, 10, 3):
        numbers = np.arange(start, min(start + 3, 10))
        assert [int(fields["value"][1]) for fields, _ in recording.samples(numbers)] == numbers.tolist()
    recording.close()
    assert [list(range(10))] * 2 == RUNS


def test_only_a_step_back_starts_the_function_over(path):
    recording = FunctionInput(path, lines).open()
    assert [int(fields["value"][1]) for fields, _ in recording.samples(np.array([2, 6, 4, 5, 5]))] == [2, 6, 4, 5, 5]
    recording.close()
    assert [[*range(10)], [*range(7)], [*range(6)], [*range(6)]] == RUNS


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(numbers=st.lists(st.integers(0, 9), max_size=20))
def test_samples_come_in_any_order(path, numbers):
    recording = FunctionInput(path, lines).open()
    found = recording.samples(np.array(numbers, np.int64))
    assert [(int(fields["value"][1]), metadata["row"]) for fields, metadata in found] == [(n, n) for n in numbers]
    assert recording.span(np.array(numbers, np.int64)).tolist() == [[n, n + 1] for n in numbers]
    recording.close()


def test_an_exception_of_the_function_is_its_own_with_a_note(path):
    with pytest.raises(KeyError, match="user's own") as caught:
        FunctionInput(path, functools.partial(failing, after=4)).open()
    (note,) = caught.value.__notes__
    assert "item 4 of" in note
    assert "a.txt" in note
    RUNS.clear()
    recording = FunctionInput(path, functools.partial(failing, after=4, runs=1)).open()
    with pytest.raises(KeyError) as caught:
        list(recording.samples(np.arange(10)))
    assert "item 4 of" in caught.value.__notes__[0]
    recording.close()


def test_a_function_that_yields_fewer_or_more_items_later_is_refused(path):
    recording = FunctionInput(path, functools.partial(counting, numbers=(8, 6))).open()
    assert len(list(recording.samples(np.arange(6)))) == 6
    with pytest.raises(SourceError, match=r"counting.*changed for .*a\.txt: 6 items instead of 8"):
        list(recording.samples(np.array([6])))
    RUNS.clear()
    recording = FunctionInput(path, functools.partial(counting, numbers=(6, 8))).open()
    with pytest.raises(SourceError, match="more than 6 items"):
        list(recording.samples(np.arange(6)))


def test_a_function_that_yields_other_fields_later_is_refused(path):
    recording = FunctionInput(path, renaming).open()
    assert len(list(recording.samples(np.arange(3)))) == 3
    with pytest.raises(SourceError, match="item 3 has other fields, other"):
        list(recording.samples(np.array([3])))


@pytest.mark.parametrize("sample", [3, {}, [1], ({"x": 1},), ({"x": 1}, 2), {3: 1}, None], ids=repr)
def test_what_is_not_an_item_is_refused_with_its_number(path, sample):
    with pytest.raises(SourceError, match=r"odd.* yields .* as item 1 of .*a\.txt"):
        FunctionInput(path, functools.partial(odd, sample=sample)).open()


def test_a_function_that_yields_nothing_is_refused(path):
    with pytest.raises(SourceError, match=r"nothing yields none for .*a\.txt"):
        FunctionInput(path, nothing).open()
    with pytest.raises(TypeError):
        FunctionInput(path, no_iterator).open()


def test_items_out_of_range_are_refused(path):
    recording = FunctionInput(path, lines).open()
    with pytest.raises(ReadError, match="it has items 0–9"):
        list(recording.samples(np.array([10])))


def test_functions_that_workers_cannot_find_are_refused_at_once(path):
    with pytest.raises(OptionError, match="top level of a module"):
        FunctionInput(path, lambda path: [])
    with pytest.raises(OptionError, match="function must take a path and yield items"):
        FunctionInput(path, 3)


def test_patterns_are_expanded_for_functions_too(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    found = convert_to_shards(str(tmp_path / "*.txt"), tmp_path / "out", format=one_line, show_progress=False)
    assert found["total_samples"] == 3
    assert TarSource(tmp_path / "out").take(np.arange(3))["x"].tolist() == [0, 1, 2]


def one_line(path: Path) -> list[dict[str, Any]]:
    return [{"x": np.int64(path.read_text())}]


def read_folder(path: Path) -> Iterator[dict[str, Any]]:
    """As of Open Ephys: the channels are in a JSON file, the values beside it."""
    RUNS.append([])
    n_channels = json.loads((path / "structure.oebin").read_text())["channels"]
    for block in np.fromfile(path / "continuous" / "continuous.dat", "<i2").reshape(-1, 2, n_channels):
        yield {"x": block}


def read_header(path: Path) -> Iterator[dict[str, Any]]:
    for value in np.fromfile(path.with_suffix(".eeg"), "<i2"):
        yield {"x": value}


def sometimes(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text().split()):
        video = None if line == "-" else np.full((2, 2), int(line), np.uint8)
        yield {"eeg": np.float32(number), "video": video, "note": None if number else "first"}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = tmp_path / "recording"
    (folder / "continuous").mkdir(parents=True)
    (folder / "structure.oebin").write_text('{"channels": 3}')
    np.arange(24, dtype="<i2").tofile(folder / "continuous" / "continuous.dat")
    return folder


def convert_once(given: Any, tmp_path: Path, function: Any, **more: Any) -> TarSource:
    convert_to_shards(given, tmp_path / "out", format=function, show_progress=False, **more)
    return TarSource(tmp_path / "out")


def test_a_folder_is_an_input_and_the_function_runs_once_to_count_and_once_to_write(
    recording: Path, tmp_path: Path
) -> None:
    source = convert_once(recording, tmp_path, read_folder)
    assert source.take(np.arange(4))["x"].tolist() == np.arange(24).reshape(4, 2, 3).tolist()
    assert len(RUNS) == 2


def test_a_conversion_notices_a_change_of_any_file_of_a_folder_and_of_a_file_beside_the_input(
    recording: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.vhdr").write_text("header")
    for place, function, values in (
        (recording, read_folder, recording / "continuous" / "continuous.dat"),
        (tmp_path / "a.vhdr", read_header, tmp_path / "a.eeg"),
    ):
        np.arange(24, dtype="<i2").tofile(values)
        one = FunctionInput(place, function)
        stamp, digest = stamp_input(one), digest_input(one)
        np.arange(1, 25, dtype="<i2").tofile(values)
        os.utime(values, ns=(1, 1))
        assert stamp_input(one) != stamp
        assert digest_input(one) != digest


def missing(path: Path) -> Iterator[dict[str, Any]]:
    yield {"x": np.fromfile(path.with_suffix(".absent"))}


def test_a_file_that_the_function_misses_is_named_with_the_item(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"FileNotFoundError: .*a\.absent.*missing failed at item 0") as caught:
        convert_once(path, tmp_path, missing)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_function_is_the_cause_of_that_of_the_conversion(
    workers: int, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "b.txt").write_text("1")
    with pytest.raises(
        ConversionError, match=r"KeyError: \"user's own\" \(.*failing.* failed at item 4 of .*a"
    ) as caught:
        convert_once([path, tmp_path / "b.txt"], tmp_path, functools.partial(failing, after=4), workers=workers)
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert "in failing" in "".join(traceback.format_exception(cause))


def test_a_field_may_be_none_in_some_items_and_all_say_whether_they_have_it(tmp_path: Path) -> None:
    for name, values in (("a", "- -"), ("b", "3 - 5")):
        (tmp_path / f"{name}.txt").write_text(values)
    found = convert_once([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path, sometimes).take(np.arange(5))
    assert found["has_video"].tolist() == [False, False, True, False, True]
    assert found["video"][:, 0, 0].tolist() == [0, 0, 3, 0, 5]
    assert found["eeg"].tolist() == [0, 1, 0, 1, 2]
    assert list(found["note"]) == ["first", "", "first", "", ""]
    with pytest.raises(SourceError, match="'video' is None in all"):
        convert_to_shards(tmp_path / "a.txt", tmp_path / "none", format=sometimes, show_progress=False)


def channels(path: Path) -> Iterator[dict[str, Any]]:
    yield {"eeg": np.zeros((int(path.read_text()), 5), np.float32)}


def test_files_whose_items_differ_in_shape_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, count in (("a", 11), ("b", 42), ("c", 42)):
        (tmp_path / f"{name}.txt").write_text(str(count))
    convert_once(str(tmp_path / "*.txt"), tmp_path, channels)
    (note,) = caplog.messages
    assert "eeg differs" in note
    assert "(11, 5) in a.txt, (42, 5) in 2 inputs (b.txt, c.txt)" in note
