"""The chain gives what Source, Plan and Loader give, bit for bit, and refuses what makes no sense."""

import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import datasets
import h5py
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import to_plain
from PIL import Image

import penstock as ps
from penstock import World
from penstock.chain import Dataset
from penstock.source import Take, open_source

N = 24


def arrays(first: int = 0) -> dict[str, Any]:
    return {"x": np.arange(N) + first, "label": np.arange(N) % 3}


def add_noise(item: Any, rng: np.random.Generator) -> Any:
    return {**item, "noise": rng.random()}


def double(item: Any) -> Any:
    return {**item, "twice": 2 * item["x"]}


@given(data=st.data())
def test_the_chain_is_source_plan_and_loader(data: st.DataObject) -> None:
    seed, size = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 7))
    tail: Any = data.draw(st.sampled_from(["short", "drop", "pad"]))
    ranks = data.draw(st.integers(1, 3))
    choose = data.draw(st.sampled_from(["all", "where", "sample", "split", "fields"]))
    order = data.draw(st.sampled_from(["none", "shuffle", "window", "balance"]))
    chain, source = ps.open(arrays()), ps.ArraySource(arrays())
    chosen: tuple[Dataset, Any] = {
        "all": lambda: (chain, source),
        "where": lambda: (chain.where("label != 1"), source.where("label != 1")),
        "sample": lambda: (chain.sample(0.5, seed), source.sample(0.5, seed)),
        "split": lambda: (chain.split(a=0.6, b=0.4, seed=seed)["a"], source.split(a=0.6, b=0.4, seed=seed)["a"]),
        "fields": lambda: (chain.fields("x", "label"), source.with_fields(["x", "label"])),
    }[choose]()
    chain, source = chosen
    ordered: tuple[Dataset, Any] = {
        "none": lambda: (chain, ps.Sequential()),
        "shuffle": lambda: (chain.shuffle(seed), ps.Shuffle()),
        "window": lambda: (chain.shuffle(seed, window=1), ps.WindowShuffle(1)),
        "balance": lambda: (chain.balance("label", seed, length=10), ps.Balanced.by(source, "label", length=10)),
    }[order]()
    chain = ordered[0].map(add_noise).batch(size, tail=tail)
    plan = ps.Plan(source.index, ordered[1], size, 0 if order == "none" else seed, tail=tail)
    assert chain.plan.identity() == plan.identity()
    for rank in range(ranks):
        world = World(rank, ranks)
        with chain.loader(world=world) as ours, ps.Loader(source, plan, transform=add_noise, world=world) as theirs:
            assert [to_plain(batch) for batch in ours] == [to_plain(batch) for batch in theirs]


def test_choosing_after_the_order_is_choosing_before_it() -> None:
    before = ps.open(arrays()).where("label == 1").fields("x").shuffle(seed=3).batch(4)
    after = ps.open(arrays()).shuffle(seed=3).fields("x").where("label == 1").batch(4)
    assert before.plan.identity() == after.plan.identity()
    assert list(after.source.fields) == ["x"]


def sequences() -> list[Any]:
    return [np.arange(1 + n % 7) + 100 * n for n in range(N)]


def test_batches_by_length_are_those_of_the_plans_by_length(tmp_path: Path) -> None:
    tokens, where = sequences(), tmp_path / "shards"
    ps.create_shards_from_arrays(where, {"tokens": tokens, "n_tokens": np.array([len(row) for row in tokens])})
    data, source = ps.open(where).fields("tokens").shuffle(seed=5), ps.TarSource(where, fields=["tokens"])
    lengths, index = ps.item_lengths(source, by="tokens"), source.index
    for chain, plan in (
        (data.bucket(4, by="tokens"), ps.Bucketed(index, lengths, 4, seed=5)),
        (data.budget(16, by="tokens", max_items=5), ps.TokenBudget(index, lengths, 16, 5, seed=5)),
        (data.pack(8, 2, by="tokens", cache=tmp_path / "cache"), ps.Packed(index, lengths, 8, 2, seed=5)),
    ):
        assert chain.plan.identity() == plan.identity()
        with chain.loader() as ours, ps.Loader(source, plan, collate=ps.Pad("tokens")) as theirs:
            assert [to_plain(batch) for batch in ours] == [to_plain(batch) for batch in theirs]
    by_column = ps.open(where).shuffle(seed=5).bucket(4, by="n_tokens", pad=ps.Pad("tokens"))
    assert by_column.plan.identity() == ps.Bucketed(index, lengths, 4, seed=5).identity()
    assert repr(data.bucket(4, by="tokens")).splitlines()[-2] == "  order   by length, seed=5"
    wrong: list[Callable[[], Any]] = [
        lambda: data.bucket(4, by="tokens").batch(3),
        lambda: data.batch(3).bucket(4, by="tokens"),
        lambda: ps.open(where).balance("n_tokens").pack(8, 2, by="tokens"),
        lambda: data.budget(3, by="tokens").plan,
    ]
    for call in wrong:
        with pytest.raises(ps.PlanError):
            call()


def test_a_mixture_in_the_chain_is_that_of_the_recipe() -> None:
    a, b = ps.ArraySource(arrays()), ps.ArraySource(arrays(100))
    mixture = ps.Mixture({"a": a.where("label == 1"), "b": b}, weights={"a": 1, "b": 3}, stop="all")
    plan = ps.Plan(mixture.index, mixture.order, 4, seed=3)
    chosen = ps.open(a).where("label == 1")
    chain = chosen.mix({"b": b}, {"a": 1, "b": 3}, name="a", stop="all").shuffle(seed=3).batch(4)
    assert chain.plan.identity() == plan.identity()
    with chain.loader() as ours, ps.Loader(mixture, plan) as theirs:
        assert [to_plain(batch) for batch in ours] == [to_plain(batch) for batch in theirs]
    wrong: list[Callable[[], Any]] = [
        lambda: chain.mix({"c": b}),
        lambda: ps.open(a).mix({"b": ps.open(b).shuffle()}),
        lambda: ps.open(a).mix({"b": b}).where("label == 1"),
        lambda: ps.open(a).mix({"b": b}).shuffle(window=1),
        lambda: ps.open(a).mix({"b": b}).bucket(2, by="x"),
    ]
    for call in wrong:
        with pytest.raises(ps.PlanError, match="must not follow"):
            call()


def test_a_mixture_that_is_opened_keeps_its_order_and_its_weights() -> None:
    a, b = ps.ArraySource(arrays()), ps.ArraySource(arrays(100))
    mixture = ps.Mixture({"a": a, "b": b}, weights={"a": 1, "b": 3}, stop="all")
    opened = ps.open(mixture).shuffle(seed=3).batch(4)
    assert opened.plan.identity() == ps.Plan(mixture.index, mixture.order, 4, seed=3).identity()
    with pytest.raises(ps.PlanError, match=r"must not follow mix\(\)"):
        ps.open(mixture).budget(64, by="x")
    how: dict[str, Any] = {"weights": [1, 1], "fields": {"m": {"source": "part"}}}
    nested = ps.Mixture({"m": mixture, "a": a}, **how)
    mixed = ps.open(a).mix({"b": b}, {"a": 1, "b": 3}, name="a", stop="all")
    for chain in (ps.open(mixture).mix({"a": a}, name="m", **how), mixed.mix({"a": a}, name="m", **how)):
        assert chain.batch(4).plan.identity() == ps.Plan(nested.index, nested.order, 4).identity()


@pytest.mark.parametrize(
    "make", [np.arange, torch.arange, lambda n: list(range(n))], ids=["arrays", "tensors", "lists"]
)
def test_fields_of_a_torch_dataset_are_padded_too(make: Callable[[int], Any]) -> None:
    items = [{"tokens": make(n % 5 + 1), "n": n % 5 + 1} for n in range(12)]
    for by in ("tokens", "n"):
        pad = None if by == "tokens" else ps.Pad("tokens")
        with ps.open(items).budget(10, by=by, pad=pad).loader() as loader:
            batches = list(loader)
        assert sorted(n for batch in batches for n in batch["lengths"].tolist()) == sorted(item["n"] for item in items)
        assert all(batch["tokens"].numel() <= 10 for batch in batches)


def test_text_is_batched_by_length_without_padding() -> None:
    with ps.open(pd.DataFrame({"text": ["a", "bb", "c", "dd"]})).bucket(2, by="text").loader() as loader:
        assert sorted(sorted(batch["text"]) for batch in loader) == [["a", "c"], ["bb", "dd"]]


def test_folders_of_shards_in_a_list_follow_each_other(places: Path) -> None:
    both = ps.open([places / "shards", places / "packed"]).fields(["x"])
    assert both.source.take(np.array([0, N + 2]))["x"].tolist() == [0, 2]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    ps.create_shards_from_arrays(folder / "shards", arrays(), shard_size=7)
    ps.create_shards_from_arrays(folder / "packed", arrays(), shard_size=7, compression="gz")
    for number in range(2):
        np.save(folder / f"part{number}.npy", np.arange(N)[number * N // 2 : (number + 1) * N // 2])
    group = zarr.open_group(folder / "rows.zarr", mode="w")
    for name, compressors in (("plain", None), ("x", "auto")):
        stored = group.create_array(name, shape=(N,), chunks=(4,), dtype="i8", compressors=compressors)
        stored[...] = np.arange(N)
    for number, name in enumerate(("cat", "dog")):
        (folder / "photos" / name).mkdir(parents=True)
        Image.fromarray(np.full((5, 6, 3), 100 + 100 * number, np.uint8)).save(folder / "photos" / name / "0.png")
    pd.DataFrame(arrays()).to_csv(folder / "table.csv", index=False)
    return folder


def test_open_finds_out_what_it_was_given(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places)
    source = ps.ArraySource(arrays())
    given: list[tuple[Any, str, str]] = [
        ("shards", "TarSource", "Shuffle()"),
        (places / "packed", "TarSource", "WindowShuffle(window=4)"),
        ("rows.zarr", "ZarrSource", "WindowShuffle(window=6)"),
        ("table.csv", "TableSource", "Shuffle()"),
        ("part*.npy", "Concat", "Shuffle()"),
        (["part0.npy", "part1.npy"], "Concat", "Shuffle()"),
        (pd.DataFrame(arrays()), "TableSource", "Shuffle()"),
        (arrays(), "ArraySource", "Shuffle()"),
        (np.arange(N), "ArraySource", "Shuffle()"),
        (torch.arange(N), "ArraySource", "Shuffle()"),
        (source, "ArraySource", "Shuffle()"),
        (ps.open(source), "ArraySource", "Shuffle()"),
        ([{"x": n} for n in range(N)], "DatasetSource", "Shuffle()"),
        (torch.utils.data.TensorDataset(torch.arange(N)), "DatasetSource", "Shuffle()"),
    ]
    for what, kind, order in given:
        data = ps.open(what)
        assert (type(data.source).__name__, repr(data.shuffle().order)) == (kind, order), what
        block = data.source.take(np.arange(N))
        if kind == "DatasetSource":
            assert [item["x"] if isinstance(item, dict) else item[0].item() for item in block[""]] == list(range(N))
        else:
            assert block["x"].tolist() == list(range(N)), what
        data.source.close()
    assert ps.open("photos").source.columns("label")["label"].tolist() == [0, 1]
    assert ps.open("photos/*/*.png").where("label == 1").source.take(np.array([0]))["image"][0].max() == 200
    assert ps.open("part1.npy").source.fields.keys() == {"part1"}
    assert ps.open("rows.zarr", fields=["plain"]).shuffle().order == ps.Shuffle()


def test_the_repr_shows_the_pipeline_as_it_will_run() -> None:
    data = ps.open(arrays()).where("label == 1").shuffle(seed=7).map(double).batch(3)
    assert repr(data) == (
        "Dataset\n"
        "  source  Take(8 of ArraySource(24 items of x, label), where('label == 1'))\n"
        "  items   8 of x int64, label int64\n"
        "  map     double\n"
        "  order   Shuffle(), seed=7\n"
        "  batch   3 items, tail='short': 3 batches per epoch"
    )
    assert repr(ps.open(arrays())).endswith("batch   not yet; next: batch(size), then loader()")


def test_a_notebook_shows_three_items_and_escapes_text() -> None:
    images = np.arange(4 * 20 * 30).reshape(4, 20, 30)
    names = np.array(["<script>alert(1)</script>"] * 4, object)
    signals = np.arange(80, dtype=">f4").reshape(4, 20)
    rows = [{"image": images[n], "name": names[n], "signal": signals[n], "n": n} for n in range(4)]
    table = ps.open(pd.DataFrame({"n": np.arange(4), "name": names}))._repr_html_()
    assert "<script" not in table
    assert table.count("&lt;script&gt;") == 3
    drawn = ps.open({"image": images, "signal": signals})._repr_html_()
    assert (drawn.count("data:image/png;base64,"), drawn.count("<polyline")) == (3, 3)
    assert "http" not in drawn
    assert "IndexError" not in ps.open(rows)._repr_html_()
    assert ps.open(Take(ps.ArraySource({"x": np.arange(3)}), []))._repr_html_().startswith("<table>")


class _Own:
    """A source of the user's own, which inherits nothing."""

    def __init__(self) -> None:
        self._inner = ps.ArraySource(arrays())
        self.index, self.fields, self.read = self._inner.index, self._inner.fields, self._inner.read
        self.take, self.close = self._inner.take, self._inner.close


def test_a_source_of_ones_own_has_the_verbs_too() -> None:
    data = ps.open(_Own()).where("label == 2").fields("x").batch(8)
    with data.loader() as loader:
        assert [batch["x"].tolist() for batch in loader] == [list(range(2, N, 3))]


def test_what_makes_no_sense_says_what_to_do(places: Path) -> None:
    data = ps.open(arrays())
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: data.batch(2).batch(3), ps.PlanError, r"batch\(\) must not follow batch\(\): batches are made once"),
        (lambda: data.batch(2).shuffle(), ps.PlanError, r"shuffle\(\) must not follow batch\(\): .* before batch\(\)"),
        (lambda: data.batch(2).map(double), ps.PlanError, r"map\(\) must not follow batch\(\)"),
        (lambda: data.batch(2).where("label == 1"), ps.PlanError, r"where\(\) must not follow batch\(\)"),
        (lambda: data.shuffle().shuffle(), ps.PlanError, r"one order"),
        (lambda: data.map(double).where("twice == 1"), ps.PlanError, r"where\(\) must not follow map\(\)"),
        (lambda: data.balance("label").sample(0.5), ps.PlanError, r"must not follow balance\(\)"),
        (data.loader, ps.PlanError, r"say how large they are with batch\(size\)"),
        (lambda: data.batch(0), ps.PlanError, r"size must be an integer >= 1, got 0"),
        (lambda: data.shuffle(-1), ps.PlanError, r"seed must be an integer >= 0, got -1"),
        (lambda: data.shuffle(window=99).batch(2).plan, ps.PlanError, r"window must be <= 1"),
        (lambda: data.where("label == 9").batch(2).loader(), ps.PlanError, r"at least one item, but none is left"),
        (lambda: data.map(3), ps.OptionError, r"A transform must be a function of an item"),
        (lambda: data.fields("y"), ps.OptionError, r"fields must be different fields"),
        (lambda: ps.open([{"x": 1}]).fields("x"), ps.OptionError, r"objects without named fields, .* such as map\("),
        (lambda: data.fields("labl"), ps.OptionError, r"got \('labl',\)\. Did you mean 'label'\?"),
        (lambda: ps.open(places / "shards").fields("labl"), ps.SourceError, r"got 'labl'\. Did you mean 'label'\?"),
        (
            lambda: data.where("label == 9").balance("label"),
            ps.PlanError,
            r"at least one item, but none is left in Take",
        ),
        (lambda: ps.open(places / "rows.zrr" / "x.h5" / "x"), ps.SourceError, r"Did you mean .*/rows\.zarr\?"),
        (lambda: ps.open(places / "nope.zarr"), ps.SourceError, r"nope\.zarr does not exist"),
        (lambda: data.batch(2).loader(num_worker=3), ps.OptionError, r"Did you mean 'num_workers'\?"),
        (lambda: data.mix({"first": arrays()}), ps.OptionError, r"different names, got 'first' twice.* name=\.\.\."),
        (
            lambda: data.mix({"b": arrays()}).where("x == 1"),
            ps.PlanError,
            r"the datasets that are mixed, before mix\(\)",
        ),
        (lambda: data.mix({"b": arrays()}, wieghts=3), ps.OptionError, r"Did you mean 'weights'\?"),
        (
            lambda: len(data),
            TypeError,
            r"has 24 items, len\(dataset\.source\.index\); len\(dataset\.loader\(\)\) counts",
        ),
        (lambda: data[3], TypeError, r"has no \[3\]: dataset\.source\.take\(\[0\]\) reads items"),
        (lambda: list(data), TypeError, r"`for batch in dataset\.batch\(32\)\.loader\(\)`"),
        (lambda: list(data.batch(2)), TypeError, r"`for batch in dataset\.loader\(\)`"),
        (lambda: next(iter(torch.utils.data.DataLoader(data))), TypeError, r"A Dataset has no length"),
        (lambda: data.balance("labl"), ps.SourceError, r"Did you mean 'label'"),
        (lambda: ps.open(3), ps.SourceError, r"got int"),
        (lambda: ps.open(places / "nowhere"), ps.SourceError, r"does not exist"),
        (lambda: ps.open(places / "*.wav"), ps.SourceError, r"No file .*\*\.wav"),
        (lambda: ps.open(["a.wav", "b.npy"]), ps.SourceError, r"must be of one kind, .* got \.npy, \.wav files"),
        (lambda: ps.open(places / "shrads"), ps.SourceError, r"does not exist\. Did you mean .*/shards\?"),
        (lambda: ps.open(places / "shards" / "*.tar"), ps.SourceError, r"is a part of the dataset '.*/shards'"),
        (lambda: ps.open(places / "photos" / "cat"), ps.SourceError, r"by a pattern, '.*/cat/\*\.png'"),
        (lambda: ps.open([places / "photos" / "cat" / "0.png"]), ps.SourceError, r"no classes in common"),
        (lambda: ps.open(places / "rows.zarr" / "nope"), ps.SourceError, r"No array at"),
        (lambda: ps.open(b"shards"), ps.SourceError, r"got bytes"),
        (lambda: data.bucket(2, by="x", widht=3), ps.OptionError, r"got widht\. Did you mean 'width'\?"),
        (lambda: data.bucket(2, by="x", seed=3), ps.OptionError, r"got seed\."),
        (lambda: data.batch(2).loader(workers=3), ps.OptionError, r"Loader takes .*; got workers"),
        (lambda: data.mix({"b": arrays()}, stpo=3), ps.OptionError, r"Did you mean 'stop'\?"),
        (lambda: ps.open(places / "shards", shape=3), ps.OptionError, r"TarSource takes fields, .*; got shape"),
        (lambda: open_source(ps.ArraySource(arrays()), fields=["x"]), ps.OptionError, r"takes none; got fields"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()


def test_a_function_that_fails_names_the_item() -> None:
    def fail(item: Any) -> Any:
        return [item][int(item["x"] == 5)]

    with ps.open(arrays()).map(fail).batch(4).loader() as loader, pytest.raises(IndexError) as caught:
        list(loader)
    assert any("item 5" in note for note in caught.value.__notes__)


def test_what_cannot_be_opened_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "trials.npz"
    np.savez(path, **arrays())
    with np.load(path) as stored:
        assert ps.open(dict(stored)).source.take(np.array([3]))["x"].tolist() == [3]
    assert ps.open(path).source.take(np.array([3]))["x"].tolist() == [3]
    with pytest.raises(ps.SourceError, match=r"At a URL, shards, zarr, .* can be opened, got s3://bucket/rows\.par"):
        ps.open("s3://bucket/rows.parquet")


class _Quacks:
    """Has what NumPy asks of an array, and would be read whole."""

    shape, dtype = (3,), np.dtype("f4")

    def __len__(self) -> int:
        return 3

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("must not be read")


def write_anndata(path: Path, root: Any) -> None:
    """Write a matrix with annotations as AnnData does, into a group of h5py or zarr."""
    root.attrs["encoding-type"] = "anndata"
    sparse = scipy.sparse.random(20, 8, density=0.2, format="csr", rng=1)
    for name, values in (("X", np.arange(40).reshape(20, 2)), ("raw/X", sparse)):
        if isinstance(values, np.ndarray):
            root[name] = values
            continue
        group = root.create_group(name)
        group.attrs["encoding-type"] = "csr_matrix"
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(values, part)
    assert path.exists()


def test_what_is_not_numpy_is_refused_at_once_with_a_way(tmp_path: Path) -> None:
    lazy, sparse = dask.array.ones((6, 6), chunks=2), scipy.sparse.csr_array(np.eye(3))
    # As xarray.open_zarr returns it: a mapping of lazy arrays with named axes.
    of_xarray = type("Dataset", (dict,), {"__module__": "xarray.core.dataset"})(a=lazy)
    stored = zarr.open_group(tmp_path / "a.zarr", mode="w")
    stored["x"] = np.arange(5)
    with h5py.File(tmp_path / "day.h5", "w") as file:
        file["x"] = np.arange(5)
        given: list[tuple[Any, str]] = [
            (of_xarray, r"xarray\.Dataset: its axes have names, .* Open the zarr behind it, .*fields=\["),
            ({"a": lazy}, r"Field 'a' must be an array in memory .*, got dask\.Array: it is not computed yet"),
            (lazy, r"got dask\.Array: it is not computed yet.*x\.compute\(\)"),
            (sparse, r"got scipy\.csr_array: the rows of a sparse matrix are no arrays.*toarray"),
            ({"x": sparse}, r"Field 'x' must .*, got scipy\.csr_array"),
            (file, r"got h5py\.File: it is not in memory. Open it by its path"),
            (file["x"], r"got h5py\.Dataset: it is not in memory"),
            (stored, r"got zarr\.Group: it is not in memory. Open it by its path"),
            ({"x": stored["x"]}, r"Field 'x' must .*, got zarr\.Array"),
            (_Quacks(), r"Field 'x' must be .*_Quacks\. Give numpy\.asarray\(x\) if it fits"),
            ({"x": torch.eye(3).to_sparse()}, r"Field 'x' must be an array that NumPy converts: .*Sparse"),
            ({"x": [np.zeros(2), np.zeros(3)]}, r"Field 'x' must be an array that NumPy converts: .*inhomogeneous"),
            ({"x": np.ma.masked_equal([1, 2], 2)}, r"Field 'x' has masked values, .*x\.filled"),
        ]
        for what, message in given:
            with pytest.raises(ps.SourceError, match=message):
                ps.open(what)
    with pytest.raises(ps.SourceError, match=r"Field 'a' must be .*, got dask\.Array"):
        ps.ArraySource(of_xarray)


def test_arrays_in_memory_of_other_libraries_are_arrays() -> None:
    values = [3, 1, 2]
    hugging = datasets.Dataset.from_dict({"x": values})["x"]
    given = [tuple(values), array.array("d", values), memoryview(bytes(values)), pd.Series(values), pl.Series(values)]
    for each in (
        *given,
        pd.Index(values),
        pa.array(values),
        hugging,
        torch.tensor(values),
        [torch.tensor(n) for n in values],
    ):
        assert ps.open({"x": each}).source.take(np.array([2, 0]))["x"].tolist() == [2, 3]


def test_groups_that_are_no_fields_are_refused_with_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for version, name in ((2, "v2.zarr"), (3, "v3.zarr")):
        write_anndata(tmp_path / name, zarr.open_group(name, mode="w", zarr_format=version))
    with h5py.File("cells.h5ad", "w") as file:
        write_anndata(tmp_path / "cells.h5ad", file)
    for name in ("v2.zarr", "v3.zarr", "cells.h5ad", (tmp_path / "v3.zarr").as_uri()):
        with pytest.raises(ps.SourceError, match=r"is a group of AnnData \(anndata\).*fields=\['X'\] if X is dense"):
            ps.open(name)
        with pytest.raises(ps.SourceError, match=r"/raw/X is a sparse matrix \(csr_matrix\).*x\.toarray\(\)"):
            ps.open(f"{name}/raw/X")
        assert ps.open(name, fields=["X"]).source.take(np.array([7]))["X"].tolist() == [[14, 15]]
    nested = zarr.open_group("nested.zarr", mode="w")
    nested["day1/x"] = np.arange(3)
    with pytest.raises(ps.SourceError, match=r"No zarr arrays in .*of one of them, such as fields=\['day1/x'\]"):
        ps.open("nested.zarr")
    weather = zarr.open_group("weather.zarr", mode="w")
    for name, values in (("lat", np.arange(8)), ("time", np.arange(99)), ("t2m", np.zeros((99, 8)))):
        weather[name] = values
    with pytest.raises(ps.SourceError, match=r"same number of rows, got .*as in fields=\['t2m', 'time'\]"):
        ps.open("weather.zarr")
    weather.create_array("crs", shape=(), dtype="i4")
    with pytest.raises(
        ps.SourceError, match=r"crs holds a single value, not rows\. Choose .*there are crs, lat, t2m, time"
    ):
        ps.open("weather.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_whose_rows_run_along_different_axes_are_refused(version: int, tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    for name, axes in (("a", ["time", "x"]), ("b", ["x", "time"]), ("c", ["time", "y"])):  # as xarray stores them
        named: dict[str, Any] = {"dimension_names": axes} if version == 3 else {}
        named = named or {"attributes": {"_ARRAY_DIMENSIONS": axes}}
        group.create_array(name, shape=(6, 6), dtype="i4", fill_value=3, **named)
    for where in (tmp_path / "x.zarr", (tmp_path / "x.zarr").as_uri()):
        for fields in (None, ["a", "b"], ["b", "c"]):
            with pytest.raises(ps.SourceError, match=r"got '[abc]' with axes \['.*Leave one out with fields=\["):
                ps.open(where, **({} if fields is None else {"fields": fields}))
        assert [len(ps.open(where, fields=fields).source.index) for fields in (["a", "c"], ["b"])] == [6, 6]


def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4", "notes"):
        (tmp_path / name).write_bytes(b"x")
    for what, pattern in ((tmp_path / "*.mp4", r"\*\.mp4"), (tmp_path, r"\*\.mp4"), (tmp_path / "a*", r"a\*")):
        with pytest.raises(
            ps.SourceError, match=rf"\.mp4 file.*not read\. Give a function .*FolderSource\('.*/{pattern}'"
        ):
            ps.open(what)
    with pytest.raises(ps.SourceError, match=r"a\.mp4 is no file that can be .*FolderSource\('.*/a\.mp4', decode=func"):
        ps.open(tmp_path / "a.mp4")
    read = ps.FolderSource(tmp_path / "*.mp4", decode=lambda path: Path(path).name)
    assert read.take(np.arange(2))["value"].tolist() == ["a.mp4", "b.mp4"]
