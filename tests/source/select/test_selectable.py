"""Selections of a source: which items they hold, and that they are sources like others."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, SourceSuite

from penstock import (
    ArraySource,
    Balanced,
    Concat,
    DatasetSource,
    Loader,
    OptionError,
    Plan,
    PlanError,
    ResumeError,
    Shuffle,
    SourceError,
    Span,
    TarSource,
    ZarrSource,
    Zip,
    create_shards_from_arrays,
)
from penstock.source import Numbered, Take

N = 40
SUBJECTS = [f"s{number * number % 7}" for number in range(N)]
QUALITY = [round(number % 10 / 10, 1) for number in range(N)]
LABELS = np.arange(N) % 3


def number_array() -> Any:
    return np.stack([np.arange(N), -np.arange(N)], axis=1).astype("f4")


def arrays() -> ArraySource:
    return ArraySource(
        {"x": number_array(), "label": LABELS, "subject": np.array(SUBJECTS), "quality": np.array(QUALITY)},
        chunk_items=4,
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("select") / "shards"
    metadata = [
        {"subject": subject, "quality": quality, **({"day": 3} if number % 2 else {})}
        for number, (subject, quality) in enumerate(zip(SUBJECTS, QUALITY, strict=True))
    ]
    create_shards_from_arrays(folder, {"x": number_array(), "label": LABELS}, shard_size=7, metadata=metadata)
    return folder


@pytest.fixture(scope="module")
def sources(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    store = tmp_path_factory.mktemp("select") / "arrays.zarr"
    group = zarr.open_group(store, mode="w")
    columns = {"label": LABELS, "quality": np.array(QUALITY), "group": np.arange(N) // 5}
    for name, array in {"x": number_array(), **columns}.items():
        stored = group.create_array(name, shape=array.shape, chunks=(6, *array.shape[1:]), dtype=array.dtype)
        stored[...] = array
    rows = [{"x": number_array()[n], "label": int(LABELS[n]), "quality": QUALITY[n]} for n in range(N)]
    return {
        "arrays": arrays,
        "shards": lambda: TarSource(shards),
        "shards without label": lambda: TarSource(shards, fields=["x"]),
        "zarr": lambda: ZarrSource(store),
        "dataset": lambda: DatasetSource(rows),
        "concat": lambda: Concat([Take(arrays(), range(15)), Take(arrays(), range(15, N))]),
        "zip": lambda: Zip([arrays().with_fields(["x"]), arrays().with_fields(["label", "quality"])]),
        "numbered": lambda: Numbered(arrays()),
        "fewer fields": lambda: Numbered(arrays()).with_fields(["x", "idx"]),
    }


def test_a_condition_chooses_the_same_items_of_every_kind_of_source(sources: Any) -> None:
    wanted = [n for n in range(N) if LABELS[n] == 1 and 0.25 < QUALITY[n] < 0.8]
    for name, make in sources.items():
        with_both = make().where("label == 1 and 0.25 < quality < 0.8")
        by_call = make().where(lambda quality, label: (label == 1) & (quality > 0.25) & (quality < 0.8))
        for found in (with_both, by_call, make().where("label == 1").where("quality > 0.25 and quality < 0.8")):
            block = found.take(np.arange(len(found.index)))
            values = [item["x"][0] for item in block[""]] if name == "dataset" else block["x"][:, 0].tolist()
            assert values == wanted, name
        assert repr(with_both).endswith("where('label == 1 and 0.25 < quality < 0.8'))")


def test_json_metadata_are_columns_with_missing_values(shards: Path) -> None:
    source = TarSource(shards, fields=["x"])
    assert {"label", "subject", "quality", "day", "__key__"} <= set(source.column_names)
    found = source.columns("subject", "day", "metadata.quality", "label")
    assert found["subject"].tolist() == SUBJECTS
    assert found["metadata.quality"].tolist() == QUALITY
    assert found["label"].tolist() == LABELS.tolist()
    assert np.isnan(found["day"]).tolist() == [number % 2 == 0 for number in range(N)]
    assert source.where("day == 3").read(Span(0, 3))["x"][:, 0].tolist() == [1, 3, 5]


def test_a_key_of_metadata_that_no_item_has_is_an_error_and_one_that_few_have_is_not(tmp_path: Path) -> None:
    metadata = [
        {"subject": "A", "probe": {"site": number % 2}, **({"rare": 1} if number == 334 else {})}
        for number in range(1000)
    ]
    create_shards_from_arrays(tmp_path / "s", {"x": np.arange(1000)}, shard_size=100, metadata=metadata)
    source = TarSource(tmp_path / "s")
    for condition, near in (
        ("metadata.subjct == 'A'", "metadata.subject"),
        ("metadata.subjct != 'A'", "metadata.subject"),
        ("metadata.probe.sit == 1", "metadata.probe.site"),
        ("probe.sit == 1", "probe.site"),
        ("subjct == 'A'", "subject"),
    ):
        with pytest.raises(SourceError, match=rf"has no column .* Did you mean '{near}'\?"):
            source.where(condition)
    assert source.where("metadata.rare == 1").read(Span(0, 1))["x"].tolist() == [334]
    assert len(source.where("metadata.rare == None").index) == 999
    assert len(source.where("metadata.probe.site == 1").index) == 500
    with pytest.raises(SourceError, match=r"few items have is named with its field: 'metadata.rare'"):
        source.where("rare == 1")


def test_a_selection_of_nothing_can_be_chosen_from_again(shards: Path) -> None:
    for source in (TarSource(shards), arrays()):
        empty = source.where("subject == 'nobody'")
        for condition in ("subject == 'A' and quality > 0.5", "label > 1", lambda quality: quality > 0.5):
            assert len(empty.where(condition).index) == 0
    with pytest.raises(SourceError, match=r"no column 'qualty'. Did you mean 'quality'"):
        arrays().where("subject == 'nobody'").where("qualty > 1")
    with pytest.raises(PlanError, match=r"needs at least one item, but none is left in Take\(0 of .*nobody"):
        Balanced.by(arrays().where("subject == 'nobody'"), "label")


@pytest.mark.parametrize(
    "condition",
    [
        lambda label, quality: label == 1 and quality > 0.5,
        lambda label, quality: label == 1 or quality > 0.5,
        lambda label: not label,
        lambda quality: 0.2 < quality < 0.5,
    ],
)
def test_and_or_and_not_over_columns_say_what_to_use_instead(condition: Any) -> None:
    with pytest.raises(OptionError, match=r"gets whole columns: use &, \| and ~ in place of and, or and not"):
        arrays().where(condition)


def test_an_error_of_the_function_itself_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^invalid literal"):
        arrays().where(lambda label: label == int("one"))


def test_columns_of_shards_are_read_without_the_other_fields(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[set[str]] = []
    take = TarSource.take

    def note_and_take(self: TarSource, items: Any, out: Any = None) -> Any:
        read.append(set(self.fields))
        return take(self, items, out)

    monkeypatch.setattr(TarSource, "take", note_and_take)
    TarSource(shards).columns("label")
    assert read == [{"label"}]


class TestSelected(SourceSuite):
    @pytest.fixture(params=["where", "sample", "split", "fields"])
    def case(self, request: pytest.FixtureRequest) -> Case:
        def make(first: int = 0) -> Any:
            source = ArraySource({"x": np.arange(N) + first, "group": np.arange(N) // 4}, chunk_items=4)
            found: dict[str, Callable[[], Any]] = {
                "where": lambda: source.where("group % 2 == 1"),
                "sample": lambda: source.sample(0.5, seed=3),
                "split": lambda: source.split(train=0.5, val=0.5, by="group")["val"],
                "fields": lambda: Numbered(source).with_fields(["x", "idx"]),
            }
            return found[request.param]()

        whole = make()
        block = whole.take(np.arange(len(whole.index)))
        return Case(make, lambda item: {name: block[name][item] for name in block}, len(whole.index), lambda: make(1))


@given(data=st.data(), seed=st.integers(0, 5))
def test_a_split_has_every_item_once_and_no_group_twice(data: st.DataObject, seed: int) -> None:
    groups = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=60))
    weights = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=min(3, len(set(groups)))))
    fractions = {f"part{number}": weight / sum(weights) for number, weight in enumerate(weights)}
    source = ArraySource({"item": np.arange(len(groups)), "group": groups})
    for by in ("group", None, np.array(groups)):
        parts = source.split(by=by, seed=seed, **fractions)
        items = {name: part.take(np.arange(len(part.index)))["item"].tolist() for name, part in parts.items()}
        assert sorted(item for part in items.values() for item in part) == list(range(len(groups)))
        again = source.split(by=by, seed=seed, **fractions)
        assert [part.index.digest for part in parts.values()] == [part.index.digest for part in again.values()]
        if by is None:
            assert all(abs(len(items[name]) - share * len(groups)) <= 1 for name, share in fractions.items())
        else:
            sides = [{groups[item] for item in part} for part in items.values()]
            assert all(sides)
            assert sum(map(len, sides)) == len(set(groups))


@given(n_items=st.integers(1, 300), seed=st.integers(0, 3), few=st.floats(0.01, 1), many=st.floats(0.01, 1))
def test_a_sample_has_its_fraction_and_lies_within_a_larger_one(
    n_items: int, seed: int, few: float, many: float
) -> None:
    few, many = sorted([few, many])
    source = ArraySource({"item": np.arange(n_items)})
    small, large = (source.sample(fraction, seed) for fraction in (few, many))
    chosen = [set(part.columns("item")["item"].tolist()) for part in (small, large)]
    assert [len(part) for part in chosen] == [max(1, round(fraction * n_items)) for fraction in (few, many)]
    assert chosen[0] <= chosen[1]


def test_fingerprints_tell_conditions_and_data_apart() -> None:
    other = ArraySource(
        {**{name: arrays().columns(name)[name].astype("U8") for name in ["subject"]}, "x": number_array() + 1}
    )
    found: list[Any] = [
        arrays().where("subject == 's1'"),
        arrays().where("subject == 's2'"),
        arrays().where("quality > 0.5"),
        arrays(),
        other.where("subject == 's1'"),
        arrays().sample(0.5, seed=1),
        arrays().sample(0.5, seed=2),
        *arrays().split(a=0.5, b=0.5, by="subject").values(),
    ]
    assert len({source.index.digest for source in found}) == len(found)
    assert arrays().where("subject == 's1'").index == arrays().where("subject in ('s1',)").index


def test_a_loader_of_a_selection_resumes_and_refuses_the_state_of_another() -> None:
    def load(condition: str) -> Loader:
        source = arrays().where(condition)
        return Loader(source, Plan(source.index, Shuffle(), batch_size=4, seed=5))

    with load("label == 1") as loader, load("label == 1") as again, load("label == 2") as other:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [batch["x"].tolist() for batch in batches]
        again.load_state_dict(state)
        assert [batch["x"].tolist() for batch in again] == rest
        with pytest.raises(ResumeError, match="another plan"):
            other.load_state_dict(state)


def test_nothing_left_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert len(arrays().where("label == 7").index) == 0
    assert "where('label == 7') keeps none of the 40 items" in caplog.text


def test_weights_and_balanced_orders_come_from_a_column(shards: Path) -> None:
    source = ArraySource({"x": np.arange(6), "kind": np.array(["b", "a", "b", "b", "b", "b"])})
    assert source.class_weights("kind") == {"a": 3.0, "b": 0.6}
    order = Balanced.by(source, "kind", length=10)
    assert repr(order) == repr(Balanced(["b", "a", "b", "b", "b", "b"], length=10))
    drawn = order.arrange(source.index, 0, 0).items(np.arange(10))
    assert (drawn == 1).sum() == 5
    assert repr(Balanced.by(TarSource(shards), "subject")) == repr(Balanced(SUBJECTS))
    with pytest.raises(PlanError, match=r"Every item must have a value of 'day', but item 0"):
        Balanced.by(TarSource(shards), "day")


def test_wrong_choices_say_what_is_allowed(shards: Path) -> None:
    source = TarSource(shards)
    for wrong, error, message in (
        (lambda: source.where("subject == s1"), SourceError, r"no column 's1'\. .* Text is written in quotes: 's1'\."),
        (lambda: source.where("subject = 's1'"), OptionError, r"Compare with ==, and join by and, or, not"),
        (lambda: source.where("subject is None"), OptionError, r"by == None and != None, not by `is`"),
        (
            lambda: source.where("`my label` == 1"),
            OptionError,
            r"a name that is none of Python is column\('my label'\)",
        ),
        (lambda: DatasetSource([{"yy": 1}]).where("yz == 1"), SourceError, r"mean 'yy'\? Its columns are 'yy'\.$"),
        (lambda: source.where("label == 1 && quality > 0"), OptionError, r"join by and, or, not"),
        (lambda: Zip([source, source]), SourceError, r"in several\. Read one of them without, .*with_fields\("),
        (lambda: source.where("qualty > 1"), SourceError, r"no column 'qualty'. Did you mean 'quality'\?"),
        (lambda: source.where(lambda columns: columns), SourceError, r"no column 'columns'"),
        (lambda: source.where(lambda: True), OptionError, r"parameters that are named like columns"),
        (lambda: source.where(lambda label: label), OptionError, r"one bool for each of 40 items, got int64"),
        (lambda: source.where([True]), OptionError, r"got bool of shape \(1,\)"),
        (lambda: source.where("x == 1"), SourceError, r"'x' of .* is an array of shape \(2,\) per item"),
        (lambda: source.where("modalities == 1"), SourceError, r"'modalities' of item 0 is a list"),
        (lambda: source.sample(0), OptionError, r"fraction must be > 0 and <= 1, got 0"),
        (lambda: source.sample(1.5), OptionError, r"fraction must be > 0 and <= 1, got 1.5"),
        (lambda: source.split(train=0.8), OptionError, r"add up to 1"),
        (source.split, OptionError, r"add up to 1"),
        (lambda: source.split(train=0.8, val=-0.2), OptionError, r"add up to 1"),
        (lambda: source.split(a=0.25, b=0.25, c=0.5, by="modalities"), SourceError, r"is a list"),
        (lambda: source.split(a=0.5, b=0.5, by="day"), SourceError, r"value of 'day', but item 0"),
        (lambda: source.split(a=0.3, b=0.3, c=0.3, d=0.1, by="label"), SourceError, r"values of 'label', got 3"),
        (lambda: source.split(a=0.5, b=0.5, by=[1, 2]), OptionError, r"one value for each of the 40 items"),
        (lambda: Numbered(arrays()).with_fields("x"), OptionError, r"fields must be different fields"),
        (lambda: arrays().with_fields(["y"]), OptionError, r"fields must be different fields"),
        (lambda: Balanced.by(np.arange(3), "label"), PlanError, r"source must have columns"),
    ):
        with pytest.raises(error, match=message):
            wrong()
