"""Samples become batches: stacked, listed or padded, with the same result either way."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import to_plain

from penstock import Loader, OptionError, RunOptions, create_webdataset_dataloader
from penstock.recipes.webdataset import WebDatasetLoader, WebDatasetWriter, collate_webdataset


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes eleven samples: sample(i) for each i."""

    def write(sample: Callable[[int], dict[str, Any]], **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("set")
        with WebDatasetWriter(folder, shard_size=4, **options) as writer:
            for i in range(11):
                writer.write_sample(sample(i))
        return folder

    return write


def uniform(i: int) -> dict[str, Any]:
    return {
        "x": np.int64(i),
        "y": np.array([i, i + 0.25], np.float32),
        "flag": np.bool_(i % 2),
        "z": np.complex64(complex(i, -i)),
        "names": np.array([f"unit {i:02d}", "u"]),
    }


def ragged(i: int) -> dict[str, Any]:
    return {"x": np.int64(i), "events": np.arange(i % 3, dtype=np.float32) + i, "note": f"item {i}", "list": [i, None]}


def table(i: int) -> dict[str, Any]:
    return {"x": np.int64(i), "t": np.full((1 + i % 2, 1 + i % 3), i, np.int32)}


def deep_same(left: Any, right: Any) -> bool:
    """Say whether two batches are equal in keys, their order, types, dtypes and values."""
    if isinstance(left, dict):
        return list(left) == list(right) and all(deep_same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(deep_same, left, right))
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


# -- the two ways to a batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [uniform, lambda i: {"x": np.int64(i)}], ids=["many kinds", "one field"])
def test_collating_samples_gives_what_the_loader_gives(written: Callable[..., Path], sample: Any) -> None:
    folder = written(sample)
    with create_webdataset_dataloader(folder, batch_size=4, num_workers=0) as loader:
        batches = list(loader)
    torchs = torch.utils.data.DataLoader(WebDatasetLoader(folder), batch_size=4, collate_fn=collate_webdataset)
    for ours, theirs in zip(batches, torchs, strict=True):
        assert deep_same(ours, theirs)


@pytest.mark.parametrize("pad_value", [None, 0, -1.5])
@pytest.mark.parametrize("sample", [ragged, table], ids=["rows", "tables"])
@pytest.mark.parametrize(
    "options",
    [None, RunOptions(executor="threads"), RunOptions(executor="processes", start_method="fork")],
    ids=["inline", "threads", "processes"],
)
def test_ragged_batches_are_the_same_whoever_makes_them(
    written: Callable[..., Path], sample: Any, pad_value: float | None, options: RunOptions | None
) -> None:
    folder = written(sample)
    if sample is table and pad_value == -1.5:
        pytest.skip("an integer field has no half numbers")
    names = {"events", "t"} & set(sample(0))
    with create_webdataset_dataloader(folder, batch_size=4, num_workers=0, pad_value=pad_value) as loader:
        alone = list(loader)
        collate = partial(collate_webdataset, ragged=names, pad_value=pad_value)
        other = Loader(loader.source, loader.plan, collate=collate, num_workers=2 if options else 0, options=options)
        with other:
            for ours, theirs in zip(alone, other, strict=True):
                assert deep_same(ours, theirs)


def test_a_ragged_field_is_a_list_in_every_batch(written: Callable[..., Path]) -> None:
    # Also where all lengths of a batch happen to be equal: batches of one show it.
    with create_webdataset_dataloader(written(ragged), batch_size=1, num_workers=0, shuffle=False) as loader:
        for i, batch in enumerate(loader):
            assert isinstance(batch["x"], torch.Tensor)
            assert [value.tolist() for value in batch["events"]] == [[float(k + i) for k in range(i % 3)]]
            assert (batch["note"], batch["list"]) == ([f"item {i}"], [[i, None]])
            assert batch["metadata"][0]["sample_id"] == f"sample_{i:09d}"


@pytest.mark.parametrize("pad_value", [0, -7])
def test_ragged_fields_are_padded_on_request_with_a_mask(written: Callable[..., Path], pad_value: float) -> None:
    folder = written(ragged)
    with create_webdataset_dataloader(
        folder, batch_size=4, num_workers=0, shuffle=False, pad_value=pad_value
    ) as loader:
        batches = list(loader)
    assert [list(batch) for batch in batches] == [["x", "events", "events_mask", "note", "list", "metadata"]] * 3
    for batch in batches:
        longest = max(x % 3 for x in batch["x"].tolist())
        assert tuple(batch["events"].shape) == tuple(batch["events_mask"].shape) == (len(batch["x"]), longest)
        assert batch["events_mask"].dtype == torch.bool
        for row, x in enumerate(batch["x"].tolist()):
            length = x % 3
            assert batch["events"][row].tolist() == [float(x + k) for k in range(length)] + [pad_value] * (
                longest - length
            )
            assert batch["events_mask"][row].tolist() == [True] * length + [False] * (longest - length)


def test_a_ragged_field_has_a_mask_in_every_batch(written: Callable[..., Path]) -> None:
    with create_webdataset_dataloader(written(ragged), batch_size=1, num_workers=0, pad_value=0) as loader:
        assert all(bool(batch["events_mask"].all()) for batch in loader)


def test_every_axis_is_padded(written: Callable[..., Path]) -> None:
    with create_webdataset_dataloader(
        written(table), batch_size=11, num_workers=0, shuffle=False, pad_value=0
    ) as loader:
        (batch,) = loader
    assert tuple(batch["t"].shape) == (11, 2, 3)
    for i in range(11):
        rows, columns = 1 + i % 2, 1 + i % 3
        assert batch["t"][i, :rows, :columns].unique().tolist() == [i]
        assert batch["t_mask"][i].sum() == rows * columns
        assert batch["t"][i][~batch["t_mask"][i]].eq(0).all()


def test_padding_does_not_touch_fields_of_fixed_shape(written: Callable[..., Path]) -> None:
    with create_webdataset_dataloader(written(uniform), batch_size=4, num_workers=0, pad_value=0) as loader:
        assert all(list(batch) == ["x", "y", "flag", "z", "names", "metadata"] for batch in loader)


# -- collate_webdataset on its own -------------------------------------------------------------------------------------


def test_numbers_strings_and_everything_else() -> None:
    samples = [
        {"i": i, "f": i / 2, "b": bool(i), "n": np.float32(i), "s": f"s{i}", "o": {"i": i}, "raw": b"r", "none": None}
        for i in range(2)
    ]
    batch = collate_webdataset(samples)
    assert (batch["i"].dtype, batch["f"].dtype, batch["b"].dtype, batch["n"].dtype) == (
        torch.int64,
        torch.float32,
        torch.bool,
        torch.float32,
    )
    assert to_plain(batch) == {
        "i": [0, 1],
        "f": [0.0, 0.5],
        "b": [False, True],
        "n": [0.0, 1.0],
        "s": ["s0", "s1"],
        "o": [{"i": 0}, {"i": 1}],
        "raw": [b"r", b"r"],
        "none": [None, None],
    }


@pytest.mark.parametrize("dtype", ["f4", "i2", "?", "u1", "c8", "f8"])
def test_arrays_keep_their_dtype(dtype: str) -> None:
    batch = collate_webdataset([{"a": np.ones(2, dtype)}, {"a": np.zeros(2, dtype)}])
    assert batch["a"].numpy().dtype == np.dtype(dtype)
    assert to_plain(batch["a"]) == [[1, 1], [0, 0]]


def test_dates_and_texts_stay_arrays_in_a_list() -> None:
    samples = [{"when": np.arange(2).astype("M8[s]"), "name": np.array(["a", "b"])} for _ in range(2)]
    batch = collate_webdataset(samples)
    assert [value.dtype.kind for value in batch["when"]] == ["M", "M"]
    assert [list(value) for value in batch["name"]] == [["a", "b"], ["a", "b"]]


def test_arrays_of_different_dtype_are_a_list_rather_than_converted() -> None:
    batch = collate_webdataset([{"a": np.float32(1)}, {"a": np.int64(2)}])
    assert [value.dtype for value in batch["a"]] == [torch.float32, torch.int64]


def test_a_field_that_is_a_tensor_in_some_samples_only_is_a_list() -> None:
    assert to_plain(collate_webdataset([{"a": torch.ones(1)}, {"a": None}])) == {"a": [[1.0], None]}


def test_no_samples_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one sample, got none"):
        collate_webdataset([])


@pytest.mark.parametrize("odd", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"c": 1}], ids=str)
def test_samples_of_different_fields_are_refused_with_the_difference(odd: dict[str, int]) -> None:
    differ = sorted({"a", "b"} ^ set(odd))
    with pytest.raises(OptionError) as caught:
        collate_webdataset([{"a": 1, "b": 2}, {"b": 2, "a": 1}, odd])
    assert f"got samples 0 and 2, which differ in {differ}" in str(caught.value)


def test_what_cannot_be_padded_is_refused_by_field() -> None:
    with pytest.raises(OptionError, match=r"To pad field 'a'.*1 axes.*2 axes"):
        collate_webdataset([{"a": torch.zeros(2)}, {"a": torch.zeros(2, 2)}], pad_value=0)
    with pytest.raises(OptionError, match=r"To pad field 'a'.*float32.*int64"):
        collate_webdataset([{"a": torch.zeros(2)}, {"a": torch.zeros(3, dtype=torch.int64)}], pad_value=0)


def test_a_mask_never_takes_the_place_of_a_field() -> None:
    samples = [{"a": torch.zeros(i), "a_mask": torch.ones(2)} for i in (1, 2)]
    with pytest.raises(OptionError, match="a_mask"):
        collate_webdataset(samples, pad_value=0)


def test_a_pad_value_that_the_dtype_cannot_hold_is_refused() -> None:
    samples = [{"a": torch.zeros(i, dtype=torch.int32)} for i in (1, 2)]
    with pytest.raises(OptionError, match=r"'a'.*0\.5"):
        collate_webdataset(samples, pad_value=0.5)


def test_the_batch_is_a_copy() -> None:
    sample = {"a": torch.zeros(2)}
    batch = collate_webdataset([sample, sample])
    batch["a"] += 1
    assert sample["a"].tolist() == [0, 0]
