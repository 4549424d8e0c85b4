"""Moments of the training items of sources and datasets: which are read, how much at a time, along which axis."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from penstock.core.errors import OptionError, ReadError
from penstock.files import read_ahead
from penstock.source.array import ArraySource
from penstock.source.dataset import DatasetSource
from penstock.transform.moments import Moments


class Watched(ArraySource):
    """Notes which items were read, and how many bytes at a time."""

    def __init__(self, arrays: Any) -> None:
        super().__init__(arrays)
        self.items: list[int] = []
        self.largest = 0

    def _note(self, items: Any, block: Any) -> Any:
        self.items += list(items)
        self.largest = max(self.largest, sum(array.nbytes for array in block.values()))
        return block

    def read(self, span: Any, out: Any = None) -> Any:
        return self._note(range(span.start, span.stop), super().read(span, out))

    def take(self, items: Any, out: Any = None) -> Any:
        return self._note(items.tolist(), super().take(items, out))


def spectrograms(n_items: int = 40, offset: float = 0.0) -> np.ndarray:
    """(item, channel, bin, time); each channel and bin has a mean and a spread of its own."""
    rng = np.random.default_rng(5)
    bins = np.arange(1.0, 7.0)[:, None]
    channels = np.array([1.0, 3.0])[:, None, None]
    return offset + rng.normal(size=(n_items, 2, 6, 9)) * bins * channels + bins


@pytest.mark.parametrize(
    ("axis", "over"), [(0, (0, 2, 3)), (-3, (0, 2, 3)), (1, (0, 1, 3)), (-2, (0, 1, 3)), (2, (0, 1, 2))]
)
def test_moments_are_along_the_given_axis(axis: int, over: tuple[int, ...]) -> None:
    data = spectrograms()
    train = [3, 1, 8, 8, 30, 39]
    moments = Moments.over(data, train, axis=axis)
    np.testing.assert_allclose(moments.mean, data[train].mean(axis=over), rtol=1e-12)
    np.testing.assert_allclose(moments.std, data[train].std(axis=over), rtol=1e-12)
    assert np.array_equal(moments.minimum, data[train].min(axis=over))
    assert moments.axis == axis
    back = Moments.from_json(json.loads(json.dumps(moments.to_json())))
    assert back == moments
    assert back.axis == axis
    assert pickle.loads(pickle.dumps(moments)) == moments


def test_a_flat_item_has_a_mean_for_each_place_on_its_axis_0_and_one_for_all_without() -> None:
    data = np.arange(12.0).reshape(4, 3)
    assert Moments.over(data, axis=0).mean.tolist() == [4.5, 5.5, 6.5]
    assert Moments.over(data).mean.tolist() == 5.5
    assert Moments.over(data).axis is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_statistics_of_the_training_items_of_data_larger_than_the_budget(tmp_path: Any, dtype: Any) -> None:
    data = spectrograms(600, offset=1e6).astype(dtype)
    np.save(tmp_path / "x.npy", data)
    source = Watched({"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "y": np.arange(600)})
    train = np.random.default_rng(1).permutation(600)[:377]
    budget = 64_000
    assert data.nbytes > 4 * budget
    for options, over in (({"axis": -2}, (0, 1, 3)), ({"per": "scalar"}, None)):
        source.items.clear()
        moments = Moments.over(source, train, field="x", memory_bytes=budget, **options)
        picked = data[train].astype(np.float64)
        np.testing.assert_allclose(moments.mean, picked.mean(axis=over), atol=1e-6, rtol=1e-12)
        np.testing.assert_allclose(moments.std, picked.std(axis=over), atol=1e-6)
        assert source.items == sorted(train.tolist())
        assert source.largest <= budget


@pytest.mark.parametrize(
    "kind", ["array", "tensors", "tuples", "mappings", "source", "dataset source", "ragged source"]
)
def test_moments_do_not_depend_on_the_kind_of_container(kind: str) -> None:
    data = spectrograms(20)
    data[3, 0, 2, 4] = np.nan
    train = range(2, 20, 3)
    given: dict[str, tuple[Any, Any]] = {
        "array": (data, None),
        "tensors": (TensorDataset(torch.from_numpy(data), torch.arange(20)), None),
        "tuples": ([(number, item) for number, item in enumerate(data)], 1),
        "mappings": ([{"x": item, "y": 0} for item in data], "x"),
        "source": (ArraySource({"x": data}), None),
        "dataset source": (DatasetSource([(item, 0) for item in data]), None),
        "ragged source": (
            DatasetSource([{"x": item[..., : 5 + 4 * (number != 3)]} for number, item in enumerate(data)]),
            "x",
        ),
    }
    held, field = given[kind]
    moments = Moments.over(held, train, axis=-2, field=field)
    picked = data[list(train)]
    np.testing.assert_allclose(moments.mean, np.nanmean(picked, axis=(0, 1, 3)), rtol=1e-12)
    np.testing.assert_allclose(moments.std, np.nanstd(picked, axis=(0, 1, 3)), rtol=1e-12)


@given(
    train=st.lists(st.integers(0, 29), min_size=1, max_size=40),
    budget=st.integers(1, 5000),
    cut=st.integers(0, 40),
)
def test_moments_depend_neither_on_the_budget_nor_on_the_workers(train: list[int], budget: int, cut: int) -> None:
    data = spectrograms(30)
    whole = data[train]
    moments = Moments.over(ArraySource({"x": data}), train, axis=-2, memory_bytes=budget)
    parts = [Moments.over(data, part, axis=-2, memory_bytes=budget) for part in (train[:cut], train[cut:]) if part]
    merged = parts[0] if len(parts) == 1 else parts[0].merge(parts[1])
    for found in (moments, merged):
        assert found.count.tolist() == [len(train) * 18] * 6
        np.testing.assert_allclose(found.mean, whole.mean(axis=(0, 1, 3)), rtol=1e-9)
        np.testing.assert_allclose(found.std, whole.std(axis=(0, 1, 3)), rtol=1e-9)


@pytest.mark.parametrize(
    ("items", "options", "said"),
    [
        ([], {}, "items must name at least one item of ndarray"),
        ([40], {}, "items must be >= 0 and < 40, the number of items of ndarray, got 40"),
        ([-1], {}, "items must be >= 0 .*, got -1"),
        ([0.5], {}, "1-D list of integers, got float64"),
        (np.ones(40, bool), {}, r"Use np.flatnonzero\(mask\) for a mask"),
        (None, {"memory_bytes": 0}, "memory_bytes must be an integer >= 1, got 0"),
        (None, {"axis": 3}, r"Items must have axis 3, .*, got shape \(2, 6, 9\)"),
        (None, {"axis": -4}, "Items must have axis -4"),
        (None, {"axis": 1.0}, "axis must be an integer, .*, got 1.0"),
        (None, {"axis": 0, "per": "scalar"}, "axis must be left out with per='scalar'"),
        (None, {"field": "x"}, "field must be None .*, got 'x'"),
    ],
)
def test_invalid_arguments_are_refused(items: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Moments.over(spectrograms(), items, **options)


def test_invalid_data_and_unknown_fields_are_refused() -> None:
    with pytest.raises(OptionError, match=r"data must be a source, .*, got generator"):
        Moments.over(item for item in [1])
    two = ArraySource({"x": np.ones(3), "y": np.ones(3)})
    with pytest.raises(OptionError, match=r"field must be one of x, y, .*, got None"):
        Moments.over(two)
    with pytest.raises(OptionError, match="must have the same axis, got -1 and 0"):
        Moments().merge(Moments(axis=0))


def test_an_item_that_cannot_be_read_is_named() -> None:
    class Broken:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, number: int) -> Any:
            if number == 6:
                raise RuntimeError("head crash")
            if number > 6:
                raise IndexError
            return np.ones(3)

    with pytest.raises(RuntimeError, match="head crash") as caught:
        Moments.over(Broken(), [6, 1])
    assert caught.value.__notes__ == ["[penstock] in item 6 of Broken"]
    with pytest.raises(ReadError, match="Item 7 of Broken is out of range, although its length is 9"):
        Moments.over(Broken(), [1, 7])


class Told(Watched):
    """Notes what it is told to read next and to release; `missing` is what `prepare` returns."""

    stored_bytes: int | None = 1 << 20

    def __init__(self, arrays: Any, missing: int | Exception | None = 1) -> None:
        super().__init__(arrays)
        self.missing = missing
        self.calls: list[tuple[str, list[int]]] = []

    def prepare(self, items: Any) -> int | None:
        self.calls.append(("prepare", items.tolist()))
        if isinstance(self.missing, Exception):
            raise self.missing
        return self.missing

    def release(self, items: Any) -> None:
        self.calls.append(("release", items.tolist()))

    def _note(self, items: Any, block: Any) -> Any:
        self.calls.append(("read", list(items)))
        return super()._note(items, block)


def test_a_source_is_told_what_is_read_next_and_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_KEPT_SHARE", 0.0)
    values = np.arange(400.0).reshape(200, 2)
    source = Told({"x": values})
    items = [*range(1, 160), 199]
    assert Moments.over(source, items, memory_bytes=2 * 70 * values[0].nbytes) == Moments.over(values, items)
    assert source.calls == [
        ("prepare", items[:70]),
        ("prepare", items[70:140]),
        ("read", items[:70]),
        ("prepare", items[140:]),
        ("release", items[:70]),
        ("read", items[70:140]),
        ("release", items[70:140]),
        ("read", items[140:]),
        ("release", items[140:]),
    ]


@pytest.mark.parametrize(
    ("missing", "stored_bytes", "share"), [(0, 1 << 20, 0.0), (1, None, 0.0), (1, 1 << 20, 0.5)], ids=str
)
def test_items_that_somebody_has_in_memory_and_those_that_fit_are_not_released(
    missing: int, stored_bytes: int | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_KEPT_SHARE", share)
    source = Told({"x": np.arange(20.0)}, missing)
    source.stored_bytes = stored_bytes
    Moments.over(source)
    assert source.calls == [("prepare", list(range(20))), ("read", list(range(20)))]


def test_a_source_that_cannot_prepare_is_read_all_the_same() -> None:
    values = np.arange(300.0)
    source = Told({"x": values}, OSError("the disk is gone"))
    assert Moments.over(source) == Moments.over(values)
    assert source.items == list(range(300))
