"""Counts of downloads add up, and differences are those of a stretch of time."""

from types import SimpleNamespace

import numpy as np
import pytest

from penstock import ArraySource
from penstock.core.transfers import Transfers
from penstock.source.combine import Concat, Numbered, Zip
from penstock.source.select.selectable import Take

FIRST = Transfers(3, 300, 1, 10, 5, 0.5, 0.25)
SECOND = Transfers(1, 20, 0, 2, 1, 0.125, 0.0)


def test_a_sum_and_a_difference_are_those_of_each_number() -> None:
    assert Transfers(4, 320, 1, 12, 6, 0.625, 0.25) == FIRST + SECOND
    assert FIRST + SECOND - SECOND == FIRST


def test_a_fraction_of_nothing_is_unknown() -> None:
    assert Transfers().hit_fraction is None
    assert Transfers(hits=3, misses=1).hit_fraction == 0.75


def test_only_what_was_downloaded_counts_as_true() -> None:
    assert not Transfers()
    assert Transfers(retries=1)


def test_local_sources_have_no_counts_and_remote_ones_are_added() -> None:
    remote = [SimpleNamespace(transfers=FIRST), SimpleNamespace(transfers=SECOND)]
    assert Transfers.of(object(), *remote) == FIRST + SECOND
    assert Transfers.of(object()) is None
    assert Transfers.of() is None


def remote_source(name: str, counts: Transfers) -> ArraySource:
    source = ArraySource({name: np.arange(4)})
    source.is_remote, source.transfers = True, counts  # type: ignore[attr-defined]  # as a remote source has
    return source


def test_a_source_made_of_others_has_downloaded_what_they_have() -> None:
    x, y = remote_source("x", FIRST), remote_source("y", SECOND)
    assert Zip([x, y]).transfers == FIRST + SECOND
    assert Concat([x, remote_source("x", SECOND)]).transfers == FIRST + SECOND
    assert Numbered(x).transfers == FIRST
    assert Take(x, [1, 2]).transfers == FIRST


@pytest.mark.parametrize("make", [Numbered, lambda source: Concat([source]), lambda source: Take(source, [0])])
def test_a_source_made_of_local_ones_has_none(make: type) -> None:
    assert make(ArraySource({"x": np.arange(4)})).transfers is None
