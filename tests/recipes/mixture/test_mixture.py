"""A mixture is a source like any other, whose items say where they come from."""

import pickle
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_source_suite import Case, SourceSuite
from penstock_test_parts import Numbers, Pairs, Records, to_plain

from penstock import (
    ArraySource,
    DamageError,
    DatasetSource,
    Loader,
    Mixture,
    PenstockError,
    Plan,
    RunOptions,
    Sequential,
    Shuffle,
    Source,
    Span,
    TarSource,
    WindowShuffle,
    World,
    ZarrSource,
    create_shards_from_arrays,
)
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.source import native


def numbers(start: int, stop: int, **others: Any) -> ArraySource:
    """Return items numbered from `start`."""
    return ArraySource({"x": np.arange(start, stop), **others}, chunk_items=4)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two datasets of shards, and a zarr array, whose items are numbered from 0, 100 and 200 on."""
    folder = tmp_path_factory.mktemp("stored")
    for name, start in (("shards", 0), ("others", 100)):
        arrays = {
            "x": np.arange(start, start + 23),
            "y": np.repeat(np.arange(start, start + 23, dtype="f4")[:, None], 3, 1),
        }
        create_shards_from_arrays(folder / name, arrays, shard_size=5, show_progress=False)
    store = zarr.open_group(folder / "rows.zarr", mode="w")
    store.create_array("image", data=np.arange(200, 217), chunks=(4,))
    return folder


class TestOfArraysAndShards(SourceSuite):
    @pytest.fixture(params=["renamed", "union", "shards", "shards with metadata", "one"])
    def case(self, request: pytest.FixtureRequest, stored: Path) -> Case:
        names = {"a": {"x": "n"}, "b": {"image": "n"}}
        y = np.zeros(3, np.float32)

        def make(first: int = 0) -> Source:
            others = ArraySource({"image": np.arange(100, 109), "label": np.full(9, 2.5, "f2")})
            parts: dict[str, Callable[[], Source]] = {
                "renamed": lambda: Mixture({"a": numbers(first, first + 7), "b": others}, fields=names),
                "union": lambda: Mixture({"a": numbers(first, first + 7), "b": others}, fields="union"),
                "shards": lambda: Mixture(
                    {n: TarSource(stored / n, fields=["x", "y"]) for n in ("shards", "others")[first:]}
                ),
                "shards with metadata": lambda: Mixture(
                    {"a": TarSource(stored / "shards"), "b": numbers(first, first + 4, z=np.zeros(4))}
                ),
                "one": lambda: Mixture({"a": numbers(first, first + 7)}),
            }
            return parts[request.param]()

        def truth(item: int) -> dict[str, Any]:
            from_b = item >= 7
            value = np.int64(item if not from_b else 93 + item)
            if request.param == "renamed":
                return {"n": value, "source": np.int64(from_b)}
            if request.param == "union":
                return {
                    "x": np.int64(0) if from_b else value,
                    "image": value if from_b else np.int64(0),
                    "label": np.float16(2.5 if from_b else 0),
                    "x_mask": np.bool_(not from_b),
                    "image_mask": np.bool_(from_b),
                    "label_mask": np.bool_(from_b),
                    "source": np.int64(from_b),
                }
            if request.param == "one":
                return {"x": np.int64(item), "source": np.int64(0)}
            number, place = divmod(item, 23)
            if request.param == "shards":
                value = np.int64(100 * number + place)
                return {"x": value, "y": y + np.float32(value), "source": np.int64(number)}
            return {"x": np.int64(place), "source": np.int64(number)}

        n_items = {"renamed": 16, "union": 16, "shards": 46, "shards with metadata": 27, "one": 7}[request.param]
        return Case(make, truth, n_items, lambda: make(1))


class TestOfDatasets(SourceSuite):
    @pytest.fixture(params=["tuples", "mappings", "tensors"])
    def case(self, request: pytest.FixtureRequest) -> Case:
        kind = {"tuples": Pairs, "mappings": Records, "tensors": Numbers}[request.param]

        def make(second: int = 9) -> Source:
            return Mixture({"a": DatasetSource(kind(7)), "b": DatasetSource(kind(second, 50))})

        def truth(item: int) -> dict[str, Any]:
            found, number = (kind(7)[item], 0) if item < 7 else (kind(9, 50)[item - 7], 1)
            if isinstance(found, dict):
                return {"": {**found, "source": number}}
            return {"": (*found, number) if isinstance(found, tuple) else (found, number)}

        return Case(make, truth, 16, lambda: make(10))


def create_shards_from_samples(folder: Path, samples: list[dict[str, Any]]) -> None:
    with WebDatasetWriter(folder, 2) as writer:
        for sample in samples:
            writer.write_sample(sample)


def three_kinds(stored: Path) -> Mixture:
    """Return a mixture of arrays, shards and zarr."""
    sources = {
        "arrays": numbers(100, 109),
        "shards": TarSource(stored / "shards", fields=["x", "y"]),
        "zarr": ZarrSource(stored / "rows.zarr"),
    }
    orders = {"shards": WindowShuffle(2), "zarr": Sequential()}
    return Mixture(sources, [0.5, 0.25, 0.25], stop="all", fields={"zarr": {"image": "x"}}, orders=orders)


class TestLoaders:
    def batches(self, mixture: Mixture, **options: Any) -> list[Any]:
        plan = Plan(mixture.index, mixture.order, batch_size=8, seed=3)
        with Loader(mixture, plan, **options) as loader:
            return [to_plain(batch) for _ in range(2) for batch in loader]

    def test_sources_of_three_kinds_give_one_order_with_any_executor_worker_and_rank(self, stored: Path) -> None:
        mixture = three_kinds(stored)
        expected = self.batches(mixture)
        starts = {0: 100, 1: 0, 2: 200}
        for batch in expected:
            assert [starts[source] for source in batch["source"]] == [x // 100 * 100 for x in batch["x"]]
        seen = {x for batch in expected for x in batch["x"]}
        assert seen == {*range(100, 109), *range(23), *range(200, 217)}
        processes = RunOptions(executor="processes", start_method="fork")
        assert self.batches(mixture, num_workers=2, options=processes) == expected
        assert self.batches(mixture, num_workers=3, options=RunOptions(executor="threads")) == expected
        ranks = [self.batches(mixture, world=World(rank, 2)) for rank in (0, 1)]
        together = [batch["x"] for pair in zip(*ranks, strict=True) for batch in pair]
        whole = Plan(mixture.index, mixture.order, batch_size=8, seed=3)
        full = whole.n_batches // 2 * 2 - 2
        assert together[:full] == [batch["x"] for batch in expected[:full]]

    def test_it_resumes_at_every_step_with_other_workers(self, stored: Path) -> None:
        mixture = three_kinds(stored)
        plan, expected = Plan(mixture.index, mixture.order, batch_size=8, seed=3), self.batches(mixture)
        for done in range(0, plan.n_batches, 3):
            with Loader(mixture, plan) as loader:
                batches = iter(loader)
                first = [to_plain(next(batches)) for _ in range(done)]
                state = loader.state_dict()
            options = {"num_workers": 2, "options": RunOptions(executor="threads")}
            with Loader(three_kinds(stored), plan, **options) as loader:
                loader.load_state_dict(state)
                rest = [to_plain(batch) for batch in loader]
            assert first + rest == expected[: plan.n_batches]


def test_weights_are_what_is_used_and_rounds_count_what_was_visited() -> None:
    sources = {"a": numbers(0, 10), "b": numbers(100, 140)}
    assert Mixture(sources).weights == {"a": Fraction(1, 5), "b": Fraction(4, 5)}
    assert Mixture(sources).rounds() == {"a": 1.0, "b": 1.0}
    assert Mixture(sources, temperature=2).weights == {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    assert Mixture(sources, {"b": 3, "a": 1}, stop="all").rounds(2) == {"a": 2 * 13 / 10, "b": 2.0}
    assert Mixture(sources, {0: [1, 1], 50: {"a": 1, "b": 3}}, stop=20).weights == {
        0: {"a": Fraction(1, 2), "b": Fraction(1, 2)},
        50: {"a": Fraction(1, 4), "b": Fraction(3, 4)},
    }
    assert Mixture(sources).names == ("a", "b")
    assert repr(Mixture(sources)) == "Mixture(50 items of x, source: a 1/5, b 4/5)"
    objects = Mixture({"a": DatasetSource(Pairs(1)), "b": DatasetSource(Pairs(3, 50))})
    assert repr(objects) == "Mixture(4 items of object: a 1/4, b 3/4)"


def test_the_identity_depends_on_names_contents_and_weights() -> None:
    def identity(sources: dict[str, Source], **options: Any) -> tuple[Any, ...]:
        mixture = Mixture(sources, **options)
        found = Plan(mixture.index, mixture.order, batch_size=4).identity()
        return found["data"], found["order"]

    a, b = numbers(0, 10), numbers(100, 140)
    base = identity({"a": a, "b": b})
    assert identity({"a": a, "b": b}) == base
    assert identity({"a": a, "c": b})[0] != base[0]
    assert identity({"a": a, "b": numbers(101, 141)})[0] != base[0]
    for options in ({"weights": [1, 1]}, {"stop": "all"}, {"orders": {"a": Sequential()}}, {"temperature": 3}):
        assert identity({"a": a, "b": b}, **options)[0] == base[0]
        assert identity({"a": a, "b": b}, **options)[1] != base[1]


def test_a_mixture_among_the_sources_keeps_its_weights() -> None:
    inner = Mixture({"p": numbers(0, 30), "q": numbers(100, 130)}, [3, 1])
    outer = Mixture({"in": inner, "z": numbers(200, 260)}, [1, 1], fields={"in": {"source": "origin"}}, stop=48)
    plan = Plan(outer.index, outer.order, batch_size=48)
    with Loader(outer, plan) as loader:
        (batch,) = loader
    assert np.bincount(batch["x"].numpy() // 100).tolist() == [18, 6, 24]


def test_strings_are_as_long_as_the_longest_and_what_varies_is_none_where_it_is_missing(tmp_path: Path) -> None:
    create_shards_from_samples(tmp_path, [{"wave": np.arange(n + 1)} for n in range(3)])
    short, long = (ArraySource({"name": np.array([name] * 2)}) for name in ("a", "long one"))
    mixture = Mixture({"a": short, "b": long, "c": TarSource(tmp_path, fields=["wave"])}, fields="union")
    with Loader(mixture, Plan(mixture.index, Sequential(), batch_size=7)) as loader:
        (batch,) = loader
    assert batch["name"] == ["a", "a", "long one", "long one", "", "", ""]
    assert batch["name_mask"].tolist() == [True] * 4 + [False] * 3
    assert batch["wave"][:4] == [None] * 4
    assert [wave.tolist() for wave in batch["wave"][4:]] == [[0], [0, 1], [0, 1, 2]]


def test_homogeneous_batches_come_from_one_source_each() -> None:
    mixture = Mixture({"a": numbers(0, 40), "b": numbers(100, 140)}, {"a": 1, "b": 3}, homogeneous=True)
    with Loader(mixture, Plan(mixture.index, mixture.order, batch_size=8)) as loader:
        found = [set(batch["source"].tolist()) for batch in loader]
    assert [source for (source,) in found] == [1, 1, 0, 1, 1, 1, 0]


def test_fields_that_are_not_wanted_are_not_read(stored: Path) -> None:
    mixture = Mixture({"a": TarSource(stored / "shards"), "b": numbers(0, 9)})
    assert list(mixture.fields) == ["x", "source"]
    first = mixture._sources._sources[0]._source
    assert list(first.fields) == ["x"]


A, B = numbers(0, 10), numbers(100, 140)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([{}], {}, "sources must be sources by name"),
        ([[A, B]], {}, "sources must be sources by name"),
        ([{1: A}], {}, "name of a source must be a string, got 1"),
        ([{"a": np.arange(3)}], {}, "Source 'a' must be a source, such as ArraySource or TarSource, got ndarray"),
        ([{"a": A, "b": B.where(np.zeros(40, bool))}], {}, "Source 'b' must have at least one item"),
        ([{"a": A, "b": B}, {"a": 0, "b": 1}], {}, "The weight of 'a' must be .* > 0, got 0"),
        ([{"a": A, "b": B}, {"a": -1.5, "b": 1}], {}, "The weight of 'a' must be .* > 0, got -1.5"),
        ([{"a": A, "b": B}, [1, float("nan")]], {}, "The weight of 'b' must be .* > 0, got nan"),
        ([{"a": A, "b": B}, [1, float("inf")]], {}, "The weight of 'b' must be .* > 0, got inf"),
        ([{"a": A, "b": B}, [1, "2"]], {}, "The weight of 'b' must be .* > 0, got '2'"),
        ([{"a": A, "b": B}, [1]], {}, r"one weight per source \('a', 'b'\), by name or in their order, got \[1\]"),
        ([{"a": A, "b": B}, 3], {}, r"one weight per source \('a', 'b'\)"),
        ([{"left": A, "right": B}, {"left": 1, "rigth": 1}], {}, "got rigth. Did you mean 'right'"),
        ([{"a": A, "b": B}, {"a": 1}], {}, "one weight per source, but 'b' has none"),
        ([{"a": A, "b": B}, {0: [1, 1], 5: {"a": 1}}], {"stop": 9}, "weights from step 5 on must have .* 'b' has none"),
        ([{"a": A, "b": B}, {5: [1, 1]}], {"stop": 9}, "must begin at step 0, got 5"),
        ([{"a": A, "b": B}, {-5: [1, 1], 0: [1, 1]}], {"stop": 9}, "A step of weights must be an integer >= 0, got -5"),
        ([{"a": A, "b": B}, {0: [1, 1], 0.5: [2, 1]}], {"stop": 9}, "A step of weights must be .* >= 0, got 0.5"),
        ([{"a": A, "b": B}, {0: [1, 1], "5": {}}], {"stop": 9}, "A step of weights must be an integer >= 0, got '5'"),
        ([{"a": A, "b": B}, {0: 1, 1: 2}], {}, "Names in weights must be among a, b, got 0"),
        ([{"a": A, "b": B}, {0: [1, 1], 5: [2, 1]}], {}, "stop must be a number of items if weights follow a schedule"),
        ([{"a": A, "b": B}, [1, 1]], {"temperature": 2}, "Use it without weights"),
        ([{"a": A, "b": B}], {"temperature": 0}, "temperature must be a finite number > 0, got 0"),
        ([{"a": A, "b": B}], {"temperature": "hot"}, "temperature must be a finite number > 0, got 'hot'"),
        ([{"a": A, "b": B}], {"stop": "last"}, "stop must be 'first', 'all' or a number of items, got 'last'"),
        ([{"a": A, "b": B}], {"stop": 0}, "stop must be an integer >= 1, got 0"),
        ([{"a": A, "b": B}], {"stop": 1.5}, "stop must be an integer >= 1, got 1.5"),
        ([{"a": A, "b": B}], {"items_per_step": 8}, "items_per_step=8 needs weights by step"),
        ([{"a": A, "b": B}], {"orders": {"c": Shuffle()}}, "Names in orders must be among a, b, got c"),
        ([{"a": A, "b": B}], {"orders": {"a": Shuffle}}, r"orders\['a'\] must be an order"),
        ([{"a": A, "b": B}], {"orders": Shuffle()}, "orders must be orders by source"),
        ([{"a": A, "b": B}], {"orders": {"a": WindowShuffle(9)}}, "Source 'a' of the mixture: window must be <= 3"),
        ([{"a": A, "b": B}], {"fields": "all"}, "fields must be 'common', 'union', or names by source"),
        ([{"a": A, "b": B}], {"fields": {"a": {"xx": "y"}}}, r"got xx. Did you mean 'x'"),
        ([{"a": A, "b": B}], {"fields": {"a": ["x"]}}, r"fields\['a'\] must be new names by field"),
        ([{"a": A, "b": B}], {"fields": {"a": {"x": "y"}}}, "must have a field in common, but 'a' has y; 'b' has x"),
        ([{"a": A, "b": ArraySource({"x": np.zeros(3)})}], {}, "'x' is int64 of shape .* 'a', but float64 of shape"),
        ([{"a": A, "b": ArraySource({"x": np.zeros((3, 2), int)})}], {}, r"but int64 of shape \(2,\) in source 'b'"),
        ([{"a": A, "b": ArraySource({"source": np.zeros(3)})}], {}, "Source 'b' has a field 'source'"),
        ([{"a": A, "b": DatasetSource([1, 2])}], {}, "'b' has items without named fields"),
        ([{"a": A, "b": numbers(0, 3, y=np.zeros(3), y_mask=np.zeros(3))}], {"fields": "union"}, "adds 'y_mask'"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        Mixture(*arguments, **options)


class TestShardsThatAreReadTogether:
    def test_items_of_several_datasets_are_read_with_one_call_if_they_are_read_alike(self, stored: Path) -> None:
        sources = [TarSource(stored / name, fields=["x", "y"]) for name in ("shards", "others")]
        first = sources[0]
        joined = first.join(sources)
        assert (joined is not None) == native.is_compiled()
        if joined is None:
            return
        n_first = len(first.index)
        items = np.array([7, n_first + 5, n_first, 22])
        out = {"x": np.full(4, -1), "y": np.full((4, 3), -1, np.float32)}
        assert not joined.take(items, out)  # no shard is open
        for source in sources:
            source.take(np.arange(len(source.index)))
        for _ in range(2):  # the second time, nothing is to be verified
            assert joined.take(items, out)
            assert out["x"].tolist() == [7, 105, 100, 22]
            assert out["y"][:, 2].tolist() == [7, 105, 100, 22]
            out["x"][:] = -1
        again = pickle.loads(pickle.dumps(joined))
        assert not again.take(items, out)  # it has opened nothing yet
        for other in (TarSource(stored / "others", fields=["x"]), TarSource(stored / "others", verify="always"), A):
            assert first.join([first, other]) is None

    def test_a_shard_that_was_written_to_is_read_again(self, stored: Path, tmp_path: Path) -> None:
        for name in ("shards", "others"):
            shutil.copytree(stored / name, tmp_path / name)
        mixture = Mixture({name: TarSource(tmp_path / name, fields=["x", "y"]) for name in ("shards", "others")})
        items = np.arange(len(mixture.index))[::-1]
        expected = mixture.take(items)["x"].tolist()
        assert mixture.take(items)["x"].tolist() == expected
        shard = sorted((tmp_path / "others").glob("*.tar"))[0]
        content = bytearray(shard.read_bytes())
        shard.write_bytes(content)
        assert mixture.take(items)["x"].tolist() == expected
        content[content.index(np.int64(100).tobytes())] ^= 1
        shard.write_bytes(content)
        with pytest.raises(DamageError, match=shard.name):
            mixture.take(items)

    def test_damage_names_the_shard_and_the_item_and_is_substituted_on_request(self, tmp_path: Path) -> None:
        for name in ("good", "bad"):
            arrays = {"x": np.arange(20 * 512, dtype=np.float32).reshape(20, 512)}
            create_shards_from_arrays(tmp_path / name, arrays, shard_size=5, show_progress=False)
        shard = sorted((tmp_path / "bad").glob("*.tar"))[2]
        content = bytearray(shard.read_bytes())
        content[2000] ^= 1
        shard.write_bytes(content)

        def read(**options: Any) -> list[float]:
            sources = {name: TarSource(tmp_path / name, fields=["x"], **options) for name in ("good", "bad")}
            return Mixture(sources).take(np.array([3, 30, 4, 38]))["x"][:, 0].tolist()

        with pytest.raises(DamageError, match=rf"item 10 in {shard.name}"):
            read()
        found = read(on_error="substitute", quarantine=tmp_path / "bad.jsonl")
        assert [found[0], found[2], found[3]] == [3 * 512, 4 * 512, 18 * 512]
        assert found[1] != 10 * 512
        assert found[1] % 512 == 0


@pytest.mark.parametrize("chosen", [["x"], ["y_mask", "x"], ["source"], ["y"], ["y", "y_mask", "source"]])
def test_fewer_fields_are_those_of_the_whole_mixture(chosen: list[str]) -> None:
    mixture = Mixture({"a": numbers(0, 7), "b": numbers(100, 109, y=np.arange(9) / 4)}, fields="union")
    fewer = mixture.with_fields(chosen)
    items = np.array([15, 0, 7, 3])
    for found, whole in (
        (fewer.take(items), mixture.take(items)),
        (fewer.read(Span(5, 9)), mixture.read(Span(5, 9))),
    ):
        assert {name: found[name].tolist() for name in found} == {name: whole[name].tolist() for name in chosen}
    assert list(fewer.fields) == chosen
    assert fewer.stored_fields == mixture.fields
    assert fewer.index == mixture.index
    assert list(fewer.with_fields(["x", "source"]).fields) == ["x", "source"]
    with pytest.raises(PenstockError, match=r"fields must be different fields of .*got"):
        fewer.with_fields(["z"])


def test_other_fields_are_not_read(tmp_path: Path) -> None:
    arrays = {"x": np.arange(8.0), "y": np.arange(100, 108.0)}
    create_shards_from_arrays(tmp_path, arrays, shard_size=8, show_progress=False)
    [shard] = tmp_path.glob("*.tar")
    content = shard.read_bytes()
    shard.write_bytes(content.replace(np.float64(103).tobytes(), np.float64(104).tobytes()))
    whole = Mixture({"a": TarSource(tmp_path, fields=["x", "y"])})
    assert whole.with_fields(["x"]).take(np.array([3, 7]))["x"].tolist() == [3.0, 7.0]
    with pytest.raises(DamageError):
        whole.take(np.array([3]))
