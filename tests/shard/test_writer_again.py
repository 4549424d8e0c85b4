"""After resume=True, a loop may start at `written` or from the beginning: no sample is stored twice, none is lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import OptionError, WriteError
from penstock.recipes.webdataset import WebDatasetWriter
from tests.shard.samples import contents, numbers, sample, start_writer, write


def stop_after(folder: Path, n_samples: int, ids: bool = False, **options: Any) -> None:
    writer = start_writer(folder, **options)
    for number in range(n_samples):
        writer.write(sample(number), f"id {number}" if ids else None, {"number": number})
    writer.abandon()


def write_from_the_beginning(folder: Path, n_samples: int, ids: bool = False, **options: Any) -> None:
    with WebDatasetWriter(folder, **{"shard_size": 3, **options}, resume=True) as writer:
        for number in range(n_samples):
            writer.write_sample(sample(number), f"id {number}" if ids else None, {"number": number})


@pytest.mark.parametrize("options", [{}, {"compression": "gz"}, {"max_shard_bytes": 8192, "shard_size": 100}], ids=str)
@pytest.mark.parametrize("ids", [False, True], ids=["numbered", "ids"])
@pytest.mark.parametrize("stopped", [0, 2, 3, 7, 8])
def test_a_loop_from_the_beginning_ends_in_the_same_bytes(
    stopped: int, ids: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    write_from_the_beginning(tmp_path / "whole", 8, ids, **options)
    stop_after(tmp_path / "set", stopped, ids, **options)
    write_from_the_beginning(tmp_path / "set", 8, ids, **options)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


def test_a_complete_dataset_is_left_as_it_is_and_takes_no_more(tmp_path: Path) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    write_from_the_beginning(tmp_path, 7)
    assert contents(tmp_path) == before
    with pytest.raises(WriteError, match="is complete"):
        write_from_the_beginning(tmp_path, 8)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("other", [0, 2, 4])
def test_other_samples_are_refused_at_the_first_that_differs(other: int, tmp_path: Path) -> None:
    stop_after(tmp_path, 6)
    writer = WebDatasetWriter(tmp_path, shard_size=3, resume=True)
    for number in range(other):
        writer.write_sample(sample(number), None, {"number": number})
    with pytest.raises(OptionError, match=f"given as number {other} differs from the one in") as caught:
        writer.write_sample(sample(other), None, {"number": -1})
    assert "from number 6 on (writer.written)" in str(caught.value)
    writer.write_sample(sample(other), None, {"number": other})
    with pytest.raises(OptionError, match=f"only the first {other + 1} were written again"):
        writer.finalize()
    writer.__exit__(OptionError, None, None)
    write_from_the_beginning(tmp_path, 7)
    assert numbers(tmp_path) == list(range(7))


def test_a_loop_that_asks_for_the_number_and_starts_over_is_refused(tmp_path: Path) -> None:
    stop_after(tmp_path, 6)
    writer = WebDatasetWriter(tmp_path, shard_size=3, resume=True)
    assert writer.written == 6
    for number in range(2):
        writer.write_sample(sample(number), None, {"number": number})
    with pytest.raises(OptionError, match=r"continue with the sample of that number, 6"):
        writer.write_sample(sample(2), None, {"number": 2})
    with pytest.raises(WriteError, match="was abandoned"):
        writer.write_sample(sample(3), None, {"number": 3})
    write_from_the_beginning(tmp_path, 7)
    assert numbers(tmp_path) == list(range(7))


def test_a_loop_with_ids_that_asks_for_the_number_may_start_over(tmp_path: Path) -> None:
    stop_after(tmp_path, 6, ids=True)
    with WebDatasetWriter(tmp_path, shard_size=3, resume=True) as writer:
        assert writer.written == 6
        for number in range(8):
            writer.write_sample(sample(number), f"id {number}", {"number": number})
    assert numbers(tmp_path) == list(range(8))


def test_samples_that_are_all_alike_may_follow_each_other(tmp_path: Path) -> None:
    """Silence after silence is no sign of a loop that starts over: whoever asked for the number is believed."""
    first = start_writer(tmp_path)
    for _ in range(7):
        first.write({"x": np.zeros(4)}, None, None)
    first.abandon()
    with WebDatasetWriter(tmp_path, shard_size=3, resume=True) as writer:
        for _ in range(writer.written, 12):
            writer.write_sample({"x": np.zeros(4)})
    assert writer.finalize()["total_samples"] == 12
