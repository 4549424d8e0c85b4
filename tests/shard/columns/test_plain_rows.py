"""Items of plain arrays: written one by one, they give the bytes that their arrays give, whatever comes between."""

from pathlib import Path

import numpy as np
import pytest

from penstock import OptionError, TarSource, create_shards_from_arrays
from penstock.recipes.webdataset import WebDatasetWriter

N_ITEMS = 1000
X = np.arange(N_ITEMS * 6, dtype=np.float32).reshape(N_ITEMS, 2, 3)
Y = np.arange(N_ITEMS)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("shard_size", [1, 7, 300, N_ITEMS])
def test_items_give_the_bytes_of_arrays_and_may_use_their_memory_again(tmp_path, shard_size):
    create_shards_from_arrays(tmp_path / "arrays", {"x": X, "y": Y}, shard_size, layout="columns", show_progress=False)
    x = np.empty((2, 3), np.float32)
    with WebDatasetWriter(tmp_path / "items", shard_size, layout="columns") as writer:
        for number in range(N_ITEMS):
            x[:] = X[number]
            writer.write_sample({"y": int(Y[number]), "x": x} if number % 2 else {"x": x, "y": Y[number]})
            assert writer.written == number + 1
        x[:] = -1
    assert contents(tmp_path / "items") == contents(tmp_path / "arrays")


def test_other_items_between_them_keep_their_place(tmp_path):
    rng = np.random.default_rng(3)
    kinds = rng.integers(0, 5, N_ITEMS).tolist()

    def write(layout: str) -> TarSource:
        with WebDatasetWriter(tmp_path / layout, 400, layout=layout) as writer:
            for number, kind in enumerate(kinds):
                x = X[number] if kind else X[number][:, :1]
                metadata = {"kind": kind} if kind == 1 else None
                writer.write_sample({"x": x, "y": Y[number]}, metadata=metadata)
        return TarSource(tmp_path / layout)

    columns, samples = (write(layout).take(np.arange(N_ITEMS)) for layout in ("columns", "samples"))
    np.testing.assert_array_equal(columns["y"], Y)
    assert list(columns["metadata"]) == list(samples["metadata"])
    for mine, its in zip(columns["x"], samples["x"], strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    "wrong",
    [{"x": X[0]}, {"x": X[0], "y": 1 << 70}, {"x": X[0].astype(np.float64), "y": 3}, {"x": X[0], "y": 0.5}, "text"],
    ids=["a field is missing", "a large integer", "another dtype", "a float", "no dict"],
)
def test_a_sample_that_does_not_fit_is_refused_and_the_others_are_kept(tmp_path, wrong):
    with WebDatasetWriter(tmp_path, 400, layout="columns") as writer:
        for number in range(10):
            writer.write_sample({"x": X[number], "y": Y[number]})
        with pytest.raises(OptionError):
            writer.write_sample(wrong)
        for number in range(10, 20):
            writer.write_sample({"x": X[number], "y": Y[number]})
    block = TarSource(tmp_path).take(np.arange(20))
    np.testing.assert_array_equal(block["x"], X[:20])
    np.testing.assert_array_equal(block["y"], Y[:20])


def test_rows_of_arrays_come_after_the_items_before_them(tmp_path):
    with WebDatasetWriter(tmp_path, 400, layout="columns") as writer:
        for number in range(30):
            writer.write_sample({"x": X[number], "y": Y[number]})
        writer.write_rows({"x": X, "y": Y}, 30, N_ITEMS)
    np.testing.assert_array_equal(TarSource(tmp_path).take(np.arange(N_ITEMS))["y"], Y)
