"""Writing samples to shards: every value is read back as given, and a killed writer resumes."""

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import exit_code

from penstock import OptionError, SourceError, TarSource, create_shards_from_arrays
from penstock.recipes.webdataset import (
    NWBToWebDatasetConverter,
    ShardedDatasetInfo,
    WebDatasetLoader,
    WebDatasetWriter,
)


def xs(samples: Any) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def metadata(folder: Path) -> list[dict[str, Any]]:
    source = TarSource(folder, fields=["metadata"])
    found = source.take(np.arange(len(source.index)))["metadata"].tolist()
    source.close()
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- write_batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_write_batch_writes_each_sample_with_its_id_and_metadata(tmp_path: Path, kind: Any) -> None:
    samples = [{"x": np.int64(i)} for i in range(5)]
    with WebDatasetWriter(tmp_path, shard_size=2) as writer:
        writer.write_batch(kind(samples), [f"id {i}" for i in range(5)], [{"trial": i} for i in range(5)])
        writer.write_batch([{"x": np.int64(5)}], metadata={"trial": 5})
        assert writer.written == 6
    assert xs(WebDatasetLoader(tmp_path, shuffle=False)) == list(range(6))
    found = metadata(tmp_path)
    assert [about["sample_id"] for about in found] == [*(f"id {i}" for i in range(5)), "sample_000000005"]
    assert [about["trial"] for about in found] == list(range(6))


def test_one_mapping_of_metadata_is_for_all_samples_of_a_batch(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_batch([{"x": np.int64(i)} for i in range(3)], metadata={"session": "a"})
    assert [about["session"] for about in metadata(tmp_path)] == ["a", "a", "a"]


@pytest.mark.parametrize("given", [{"sample_ids": ["a"]}, {"metadata": [{}, {}, {}]}, {"sample_ids": []}], ids=str)
def test_a_batch_with_too_few_or_too_many_companions_is_refused_whole(tmp_path: Path, given: dict[str, Any]) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        with pytest.raises(OptionError, match="must have the same length, got 2, "):
            writer.write_batch([{"x": np.int64(i)} for i in range(2)], **given)
        assert writer.written == 0
        writer.write_batch([{"x": np.int64(7)}])
    assert xs(WebDatasetLoader(tmp_path)) == [7]


def test_a_batch_of_nothing_is_nothing(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_batch([])
        writer.write_sample({"x": np.int64(1)})
    assert xs(WebDatasetLoader(tmp_path)) == [1]


def test_writing_a_little_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    create_shards_from_arrays(tmp_path, {"x": np.arange(10)})
    assert capfd.readouterr() == ("", "")


# -- create_shards_from_arrays -----------------------------------------------------------------------------------------


def numbers(n: int = 11) -> np.ndarray:
    return np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3)


def given_as(kind: str, folder: Path) -> Any:
    values = numbers()
    if kind == "memory map":
        np.save(folder / "values.npy", values)
        return np.load(folder / "values.npy", mmap_mode="r")
    if kind == "tensor with a gradient":
        return torch.from_numpy(values).requires_grad_()
    if kind == "strided view":
        wide = np.zeros((22, 2, 6), np.float32)
        wide[::2, :, ::2] = values
        return wide[::2, :, ::2]
    made = {
        "array": lambda: values,
        "tensor": lambda: torch.from_numpy(values),
        "transposed tensor": lambda: torch.from_numpy(values.transpose(0, 2, 1).copy()).transpose(1, 2),
        "Fortran order": lambda: np.asfortranarray(values),
        "big-endian": lambda: values.astype(">f4"),
        "list of arrays": lambda: list(values),
        "read-only": lambda: np.frombuffer(values.tobytes(), np.float32).reshape(values.shape),
    }
    return made[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "array",
        "memory map",
        "tensor",
        "tensor with a gradient",
        "transposed tensor",
        "Fortran order",
        "big-endian",
        "strided view",
        "list of arrays",
        "read-only",
    ],
)
@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_arrays_of_any_kind_are_written_as_they_are(tmp_path: Path, kind: str, array_format: str) -> None:
    given = {"x": np.arange(11), "values": given_as(kind, tmp_path)}
    summary = create_shards_from_arrays(tmp_path / "set", given, shard_size=4, array_format=array_format)
    assert (summary["total_samples"], summary["total_shards"]) == (11, 3)
    source = TarSource(tmp_path / "set")
    block = source.take(np.arange(11))
    assert block["x"].tolist() == list(range(11))
    assert block["values"].dtype == np.float32
    assert block["values"].tobytes() == numbers().tobytes()
    source.close()


def test_a_memory_map_is_read_row_by_row(tmp_path: Path) -> None:
    class Watched:
        """An array that is never seen whole."""

        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> np.ndarray:
            self.asked.append(number)
            return np.full(3, number)

    watched = Watched()
    create_shards_from_arrays(tmp_path, {"x": np.arange(6), "v": watched}, shard_size=4)
    assert watched.asked == list(range(6))
    assert [sample["v"].tolist() for sample in WebDatasetLoader(tmp_path, shuffle=False)] == [[i] * 3 for i in range(6)]


def test_metadata_of_the_whole_set_is_kept_once_and_that_of_samples_with_them(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "whole", {"x": np.arange(3)}, metadata={"subject": "mouse 7"})
    create_shards_from_arrays(tmp_path / "each", {"x": np.arange(3)}, metadata=[{"trial": i} for i in range(3)])
    assert ShardedDatasetInfo(tmp_path / "whole").get_summary()["metadata"] == {"subject": "mouse 7"}
    assert all("subject" not in about for about in metadata(tmp_path / "whole"))
    assert [about["trial"] for about in metadata(tmp_path / "each")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, {}, "All arrays must have same first dimension.*'x': 3, 'y': 4"),
        ({}, {}, "must map names to arrays"),
        ([np.zeros(3)], {}, "must map names to arrays"),
        ({"x": np.zeros(0)}, {}, "at least one sample"),
        ({"x": np.zeros(3)}, {"metadata": [{}]}, "a list of 3, one per sample, got 1"),
        ({"x": np.zeros(3)}, {"shard_size": 0}, "shard_size must be an integer >= 1, got 0"),
        ({"x": np.zeros(3)}, {"compression": "zip"}, "compression must be one of .*, got 'zip'"),
        ({"x": np.zeros(3)}, {"array_format": "hdf5"}, "array_format must be .*, got 'hdf5'"),
        ({"x": np.array([[{}], [None]])}, {}, "'x' must hold numbers or fixed-width strings, got Python objects"),
        ({"metadata": np.zeros(3)}, {}, "'metadata' is reserved"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_dataset(
    tmp_path: Path, data: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        create_shards_from_arrays(tmp_path / "set", data, **options)
    with pytest.raises(SourceError, match=r"No shards found|No dataset"):
        WebDatasetLoader(tmp_path / "set")


def test_an_unknown_option_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"got compresion\. Did you mean 'compression'\?"):
        create_shards_from_arrays(tmp_path, {"x": np.zeros(3)}, compresion="gz")
    with pytest.raises(TypeError, match=r"'compresion'\. Did you mean 'compression'\?"):
        WebDatasetWriter(tmp_path, compresion="gz")
    with pytest.raises(OptionError, match=r"got bin_size\. Did you mean 'bin_size_ms'\?"):
        NWBToWebDatasetConverter(tmp_path, bin_size=2)


def test_an_array_without_a_length_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'x'"):
        create_shards_from_arrays(tmp_path, {"x": np.float32(3), "y": np.zeros(3)})


def test_a_tensor_that_numpy_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'v' must have a dtype that numpy supports, got torch\.bfloat16"):
        create_shards_from_arrays(tmp_path, {"v": torch.zeros(3, 2, dtype=torch.bfloat16)})


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        create_shards_from_arrays(tmp_path / name, {"x": np.arange(9), "v": numbers(9)}, shard_size=4, compression="gz")
    assert content(tmp_path / "a") == content(tmp_path / "b")


class Fatal:
    """Eleven rows, one of which kills the process that asks for it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> np.ndarray:
        if number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(50, number, np.float32)


def killed(folder: Path, at: int, compression: str) -> None:
    given = {"x": np.arange(11), "v": Fatal(at)}
    create_shards_from_arrays(folder, given, shard_size=3, compression=compression, resume=True)


@pytest.mark.parametrize("compression", ["none", "gz"])
def test_a_writer_that_is_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, compression: str) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    for at in (2, 7, 10):
        assert exit_code(killed, folder, at, compression) == -signal.SIGKILL
        with pytest.raises(SourceError, match="resume=True"):
            TarSource(folder)
    given = {"x": np.arange(11), "v": np.repeat(np.arange(11, dtype=np.float32)[:, None], 50, axis=1)}
    resumed = create_shards_from_arrays(folder, given, shard_size=3, compression=compression, resume=True)
    whole = create_shards_from_arrays(tmp_path / "whole", given, shard_size=3, compression=compression)
    assert content(folder) == content(tmp_path / "whole")
    assert resumed == whole
    # Once more: there is nothing left to do.
    assert create_shards_from_arrays(folder, given, shard_size=3, compression=compression, resume=True) == whole
    assert content(folder) == content(tmp_path / "whole")


def test_resuming_with_other_options_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    assert exit_code(killed, folder, 7, "none") == -signal.SIGKILL
    with pytest.raises(OptionError, match="Use the same options"):
        create_shards_from_arrays(folder, {"x": np.arange(11)}, shard_size=4, resume=True)


def test_resuming_where_nothing_was_begun_begins(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "set", {"x": np.arange(5)}, resume=True)
    assert xs(WebDatasetLoader(tmp_path / "set", shuffle=False)) == list(range(5))


# -- ShardedDatasetInfo ------------------------------------------------------------------------------------------------


@pytest.fixture
def described(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    with WebDatasetWriter(folder, shard_size=2, metadata={"subject": "mouse 7"}) as writer:
        for i in range(5):
            sample = {"spikes": np.zeros((4, 3), np.float32), "events": np.zeros(i), "note": "left", "n": i}
            writer.write_sample(sample)
    return folder


def shown(folder: Path) -> str:
    out = io.StringIO()
    ShardedDatasetInfo(folder).print_summary(out)
    return out.getvalue()


def test_the_summary_says_what_there_is(described: Path) -> None:
    summary = ShardedDatasetInfo(described).get_summary()
    size = sum(path.stat().st_size for path in described.glob("*.tar"))
    assert {
        "total_samples": 5,
        "total_shards": 3,
        "shard_size": 2,
        "compression": "none",
        "modalities": ["spikes", "events", "note", "n"],
        "total_bytes": size,
        "metadata": {"subject": "mouse 7"},
        "problems": [],
    }.items() <= summary.items()
    assert summary["fields"] == {
        "spikes": {"dtype": "float32", "shape": [4, 3], "stored_as": "npy"},
        "events": {"dtype": "float64", "shape": None, "stored_as": "npy"},
        "note": {"dtype": None, "shape": None, "stored_as": "txt"},
        "n": {"dtype": "int64", "shape": [], "stored_as": "npy"},
        "metadata": {"dtype": None, "shape": None, "stored_as": "json"},
    }
    assert json.loads(json.dumps(summary)) == summary


def test_the_printed_summary_is_for_a_person(described: Path) -> None:
    lines = shown(described).splitlines()
    assert f"Dataset      {described}" in lines
    assert "Samples      5 in 3 shards of up to 2" in lines
    assert "Compression  none" in lines
    assert any(line.startswith("Health") and "all shards are present" in line for line in lines)
    assert "  spikes    .npy   float32 (4, 3)" in lines
    assert "  events    .npy   float64 varies" in lines
    assert "  note      .txt" in lines
    assert "  subject: mouse 7" in lines


def test_a_shard_that_is_missing_or_cut_off_is_reported(described: Path) -> None:
    (described / "shard_000001.tar").unlink()
    with (described / "shard_000002.tar").open("r+b") as file:
        file.truncate(1000)
    problems = ShardedDatasetInfo(described).get_summary()["problems"]
    assert [problem.split(" ")[0] for problem in problems] == ["shard_000001.tar", "shard_000002.tar"]
    assert "missing" in problems[0]
    assert "1000 bytes" in problems[1]
    text = shown(described)
    assert "shard_000001.tar is missing" in text
    assert "shard_000002.tar has 1000 bytes" in text


def test_print_summary_goes_to_standard_output(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ShardedDatasetInfo(described).print_summary()
    assert capsys.readouterr().out == shown(described)


def test_nothing_of_the_data_is_read(described: Path) -> None:
    for shard in described.glob("*.tar"):
        size = shard.stat().st_size
        shard.write_bytes(bytes(size))
    assert ShardedDatasetInfo(described).get_summary()["total_samples"] == 5
