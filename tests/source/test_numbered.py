"""Numbered: a source with the number of each item as an additional field."""

import numpy as np
import pytest

from penstock.core.errors import SourceError
from penstock.core.types import Span
from penstock.source.array import ArraySource
from penstock.source.combine import Concat, Numbered
from penstock.source.dataset import DatasetSource
from penstock.source.select.selectable import Take

VALUES = np.arange(12.0).reshape(6, 2)


def test_numbers_are_those_of_the_wrapped_source() -> None:
    both = Numbered(Concat([ArraySource({"x": VALUES}), ArraySource({"x": VALUES + 100})]))
    items = np.array([7, 0, 7, 11])
    block = both.take(items)
    assert block["idx"].dtype == both.fields["idx"].dtype == np.int64
    assert block["idx"].tolist() == items.tolist()
    assert np.array_equal(block["x"], np.concatenate([VALUES, VALUES + 100])[items])
    assert both.read(Span(5, 8))["idx"].tolist() == [5, 6, 7]
    assert Take(both, [9, 2]).read(Span(0, 2))["idx"].tolist() == [9, 2]
    assert both.index.digest == Concat([ArraySource({"x": VALUES}), ArraySource({"x": VALUES + 100})]).index.digest


def test_out_is_filled() -> None:
    source = Numbered(ArraySource({"x": VALUES}), "n")
    for read in (lambda out: source.take(np.array([4, 5]), out), lambda out: source.read(Span(4, 6), out)):
        out = {"x": np.zeros((2, 2)), "n": np.zeros(2, np.int64)}
        block = read(out)
        assert block["n"] is out["n"]
        assert (out["n"].tolist(), out["x"].tolist()) == ([4, 5], VALUES[4:].tolist())
    items = np.array([1, 2])
    assert source.take(items)["n"].tolist() == [1, 2]
    source.close()


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(SourceError, match="'x' must be a new field"):
        Numbered(ArraySource({"x": VALUES}), "x")
    with pytest.raises(SourceError, match="named fields"):
        Numbered(DatasetSource([1, 2]))
