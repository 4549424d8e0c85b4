"""What trainers get in place of a loader counts what it delivered, whichever loader it is."""

from itertools import islice
from pathlib import Path

import pytest

from tests.suites.loaders import LOADERS


@pytest.mark.parametrize("name", [name for name in LOADERS if name.startswith("Feed, ")])
def test_a_feed_says_what_was_delivered_of_its_epoch(name: str, tmp_path: Path) -> None:
    make = LOADERS[name](tmp_path).make
    feed = make()
    counts = [feed.delivered for _ in islice(feed, 5)]
    assert counts == [1, 2, 3, 4, 5]
    again = make()
    again.load_state_dict(feed.state_dict())
    assert (again.delivered, again.epoch, again.place()["batch"]) == (5, 0, 5)
    assert [again.delivered for _ in again] == [6, 7, 8, 9, 10, 11, 12]
