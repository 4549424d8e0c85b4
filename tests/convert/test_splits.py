"""Which items go to which split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.convert.splits import Split, assign_groups, cut_by_time, parse_split
from penstock.core.errors import OptionError, SourceError

THREE = (("train", 0.8), ("val", 0.1), ("test", 0.1))


@st.composite
def shares(draw: st.DrawFn) -> tuple[tuple[str, float], ...]:
    weights = draw(st.lists(st.integers(1, 20), min_size=2, max_size=4))
    return tuple((f"part{number}", weight / sum(weights)) for number, weight in enumerate(weights))


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[str], list[int], Split]:
    """Groups and sizes of inputs; several inputs may be of one group."""
    split = Split(draw(shares()), "subject", draw(st.integers(0, 3)))
    n_groups = draw(st.integers(len(split.shares), 15))
    more = draw(st.lists(st.integers(0, n_groups - 1), max_size=15))
    groups = draw(st.permutations([f"m{number}" for number in [*range(n_groups), *more]]))
    sizes = draw(st.lists(st.integers(1, 200), min_size=len(groups), max_size=len(groups)))
    return list(groups), sizes, split


@given(recordings())
def test_every_group_is_on_one_side_and_no_split_is_empty(case: tuple[list[str], list[int], Split]) -> None:
    groups, sizes, split = case
    side = assign_groups(groups, sizes, split)
    assert side.keys() == set(groups)
    assert set(side.values()) == set(split.names)


@given(recordings())
def test_shares_are_missed_by_no_more_than_the_groups_at_the_borders(case: tuple[list[str], list[int], Split]) -> None:
    groups, sizes, split = case
    side = assign_groups(groups, sizes, split)
    totals = {group: sum(size for g, size in zip(groups, sizes, strict=True) if g == group) for group in set(groups)}
    if len(totals) < 3 * len(split.shares):
        return  # few groups: that none is empty comes first
    for name, share in split.shares:
        found = sum(totals[group] for group in totals if side[group] == name)
        smallest, largest = min(share for _, share in split.shares) * sum(sizes), max(totals.values())
        slack = largest if smallest > largest else largest * len(split.shares)
        assert abs(found - share * sum(sizes)) <= slack


@given(recordings())
def test_sides_depend_neither_on_the_order_of_inputs_nor_on_how_groups_are_cut(
    case: tuple[list[str], list[int], Split],
) -> None:
    groups, sizes, split = case
    halves = [*zip(groups, sizes, strict=True)][::-1]
    assert assign_groups([g for g, _ in halves], [s for _, s in halves], split) == assign_groups(groups, sizes, split)


@pytest.mark.parametrize("parts", [THREE, (("train", 0.5), ("val", 0.5))])
@given(seed=st.integers(0, 50), n_groups=st.integers(10, 60))
def test_a_group_that_is_added_moves_one_other_at_each_border_at_most(
    parts: tuple[tuple[str, float], ...], seed: int, n_groups: int
) -> None:
    split, names = Split(parts, seed=seed), [f"mouse{number}" for number in range(n_groups + 1)]
    before = assign_groups(names[:-1], [50] * n_groups, split)
    after = assign_groups(names, [50] * (n_groups + 1), split)
    moved = [name for name in before if before[name] != after[name]]
    assert len(moved) <= len(parts) - 1


def test_another_seed_gives_other_sides() -> None:
    names = [f"mouse{number}" for number in range(30)]
    sides = [assign_groups(names, [10] * 30, Split(THREE, seed=seed)) for seed in (0, 1)]
    assert sides[0] != sides[1]


def test_assignments_are_pinned() -> None:
    side = assign_groups(list("abcdefghij"), [10] * 10, Split(THREE, "subject"))
    chosen = {name: "".join(sorted(group for group in side if side[group] == name)) for name, _ in THREE}
    # Another order of hashes is a breaking change: what was in the test set would be trained on.
    assert chosen == {"train": "bcdefghi", "val": "a", "test": "j"}


def test_fewer_groups_than_splits_are_refused_by_name() -> None:
    with pytest.raises(SourceError, match=r"3 splits need .* subjects, got 2 \(anna, bert\)"):
        assign_groups(["anna", "bert", "anna"], [1, 2, 3], Split(THREE, "subject"))


@st.composite
def spans(draw: st.DrawFn) -> np.ndarray:
    begin, step = draw(st.floats(-100, 100)), draw(st.floats(0.01, 3))
    length = draw(st.floats(0.01, 5))
    starts = begin + step * np.arange(draw(st.integers(1, 80)))
    return np.stack([starts, starts + length], axis=1)


@given(spans=spans(), parts=shares())
def test_no_sample_crosses_a_border_and_those_that_do_not_are_kept(
    spans: np.ndarray, parts: tuple[tuple[str, float], ...]
) -> None:
    found = cut_by_time(spans, Split(parts, "time"))
    begin, end = spans[:, 0].min(), spans[:, 1].max()
    borders = begin + (end - begin) * np.cumsum([0.0, *(share for _, share in parts)])
    slack, taken = 1e-9 * (end - begin), set()
    for (name, _), left, right in zip(parts, borders[:-1], borders[1:], strict=True):
        numbers = [number for start, stop in found[name] for number in range(start, stop)]
        assert all(spans[number, 0] >= left - slack and spans[number, 1] <= right + slack for number in numbers)
        assert not taken & set(numbers)
        taken |= set(numbers)
    for number in set(range(len(spans))) - taken:
        inside = (spans[number, 0] < borders[1:-1] - slack) & (spans[number, 1] > borders[1:-1] + slack)
        near = (np.abs(spans[number, :, None] - borders[1:-1]) <= slack).any()
        assert inside.any() or near, "left out although it crosses no border"


@pytest.mark.parametrize("n_rows", [10, 100, 1000, 1003])
@pytest.mark.parametrize("parts", [(0.7, 0.2, 0.1), (0.57, 0.43), (0.1, 0.2, 0.3, 0.4), (0.8, 0.1, 0.1)])
def test_rows_that_only_touch_a_border_are_not_lost_to_rounding(n_rows: int, parts: tuple[float, ...]) -> None:
    rows = np.stack([np.arange(n_rows), np.arange(1, n_rows + 1)], axis=1).astype(np.float64)
    names = [f"part{number}" for number in range(len(parts))]
    found = cut_by_time(rows, Split(tuple(zip(names, parts, strict=True)), "time"))
    kept = [number for name in names for start, stop in found[name] for number in range(start, stop)]
    borders = [round(n_rows * 1000 * sum(parts[: number + 1])) for number in range(len(parts) - 1)]
    crossing = {border // 1000 for border in borders if border % 1000}
    assert kept == [row for row in range(n_rows) if row not in crossing]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((("a", 0.5), ("a", 0.5)), "must be unique"),
        ((("a/b", 1.0),), "names of folders"),
        (((".hidden", 1.0),), "names of folders"),
        (((".", 0.5), ("..", 0.5)), "names of folders"),
        ((("", 0.5), ("b", 0.5)), "names of folders"),
        ((("a\0", 0.5), ("b", 0.5)), "names of folders"),
        ((("a", 0.5), ("b", 0.4)), "add up to 1"),
        ((("a", 1.5), ("b", -0.5)), "add up to 1"),
        ((("a", 1.0), ("b", 0.0)), "add up to 1"),
        ((("a", float("nan")),), "add up to 1"),
        ((), "add up to 1"),
    ],
)
def test_invalid_splits_are_refused(parts: tuple[tuple[str, float], ...], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        Split(parts)


def test_group_by_is_the_name_of_a_column() -> None:
    for wrong in ("", None, 3):
        with pytest.raises(OptionError, match="group_by must be 'file', 'time' or the name of a metadata column"):
            Split(THREE, wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="seed"):
        Split(THREE, seed=-1)


def test_a_text_gives_the_shares_in_its_order() -> None:
    assert parse_split("train=0.8, val=0.1,test=0.1,") == THREE


@pytest.mark.parametrize("text", ["train", "train=", "train=most", "train=0.8=3,val=0.2", "train:0.8"])
def test_a_text_without_fractions_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match=r"such as train=0\.8"):
        Split(parse_split(text))


@pytest.mark.parametrize("text", ["", "=0.5,b=0.5", "a=0.5,a=0.5", "a=inf"])
def test_a_text_that_is_an_invalid_split_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"add up to 1|names of folders"):
        Split(parse_split(text))


def test_shares_may_be_a_mapping() -> None:
    assert Split(dict(THREE), "subject") == Split(THREE, "subject")
    with pytest.raises(OptionError, match="add up to 1"):
        Split({"train": 0.5})
