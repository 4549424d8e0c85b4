"""Conditions over columns: what they choose, and what they refuse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.source.select.expression import parse_condition

ROWS = [
    {"subject": "A", "label": 2, "quality": 0.25, "ok": True},
    {"subject": "B", "label": 0, "quality": 0.5, "ok": False},
    {"subject": "A", "label": 200, "quality": 0.75, "ok": True},
    {"subject": "C", "label": 1, "quality": 1.0, "ok": False},
]
COLUMNS: dict[str, Any] = {
    "subject": np.array([row["subject"] for row in ROWS], object),
    "label": np.array([row["label"] for row in ROWS], np.uint8),
    "quality": np.array([row["quality"] for row in ROWS], np.float32),
    "ok": np.array([row["ok"] for row in ROWS]),
}


def conditions() -> st.SearchStrategy[str]:
    number = st.one_of(
        st.sampled_from(["label", "quality"]), st.integers(-3, 300).map(str), st.sampled_from(["0.5", "1e2"])
    )
    sums = st.builds("({} {} {})".format, number, st.sampled_from("+-*"), number)
    signs = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
    leaves = st.one_of(
        st.builds("label {} {}".format, signs, st.one_of(number, sums)),
        st.builds("{} {} quality {} {}".format, number, signs, signs, number),
        st.builds("{} {} 'B'".format, st.sampled_from(["subject", "'C'"]), signs).map(
            lambda text: f"subject != {text}"
        ),
        st.sampled_from(["ok", "subject in ['A', 'C']", "label not in (0, -1, 200)", "subject == 'A'"]),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds("({} and {})".format, inner, inner),
            st.builds("({} or {})".format, inner, inner),
            inner.map("not {}".format),
        ),
        max_leaves=6,
    )


@given(conditions())
def test_a_condition_says_of_each_item_what_python_says(text: str) -> None:
    condition = parse_condition(text)
    wanted = [bool(eval(text, {}, row)) for row in ROWS]  # the law: equal to Python, item by item
    assert condition.evaluate(COLUMNS).tolist() == wanted


def test_missing_values_fulfil_no_comparison_but_that_with_none() -> None:
    columns: dict[str, Any] = {"who": np.array(["A", None, "B"], object), "n": np.array([1.0, np.nan, 3.0])}
    for text, wanted in (
        ("who == None", [False, True, False]),
        ("n != None", [True, False, True]),
        ("who > 'A'", [False, False, True]),
        ("who != 'A'", [False, True, True]),
        ("n < 3", [True, False, False]),
        ("n in (1, None)", [True, True, False]),
        ("who in ('B', None)", [False, True, True]),
        ("not n < 3", [False, True, True]),
    ):
        assert parse_condition(text).evaluate(columns).tolist() == wanted, text


def test_dates_are_compared_with_text() -> None:
    columns: dict[str, Any] = {"day": np.array(["2026-11-16", "NaT", "2026-11-17"], "M8[us]")}
    assert parse_condition("day >= '2026-11-17'").evaluate(columns).tolist() == [False, False, True]
    assert parse_condition("day == None").evaluate(columns).tolist() == [False, True, False]
    with pytest.raises(OptionError, match=r"compares dates with numbers"):
        parse_condition("day > 3").evaluate(columns)


def test_any_name_can_be_a_column() -> None:
    condition = parse_condition("column('class') == 1 and meta.day > 0")
    assert condition.columns == ("class", "meta.day")
    assert condition.evaluate({"class": np.array([1, 1]), "meta.day": np.array([0, 1])}).tolist() == [False, True]


def test_what_is_refused_is_said_once() -> None:
    with pytest.raises(OptionError, match=r"^A condition must consist of columns.* is something else") as caught:
        parse_condition("__import__('os') == 1")
    assert str(caught.value).count("A condition must") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "label",
        "label +",
        "label = 1",
        "1 < 2",
        "label and ok",
        "label == 'A'",
        "subject > 3",
        "subject + 1 == 2",
        "label in label",
        "label in (1, 'A')",
        "'A' in subject",
        "label is 1",
        "label > None",
        "label == [1]",
        "label ** 9 > 1",
        "label << 99 > 1",
        "label[0] == 1",
        "len(subject) == 1",
        "__import__('os').system('true') == 0",
        "(lambda: 1)() == label",
        "[label for label in ()] == 1",
        "f'{label}' == 'A'",
        "(label := 1) == 1",
        "label == 1j",
        "label == b'1'",
        "label == \0",
        "not " * 3000 + "ok",
        "(" * 300 + "ok" + ")" * 300,
        "ok or " * 9000 + "ok",
        "label + 99999999999999999999999999 > 1",
    ],
)
def test_anything_else_is_refused_and_never_executed(text: str) -> None:
    with pytest.raises(OptionError):
        parse_condition(text).evaluate(COLUMNS)
