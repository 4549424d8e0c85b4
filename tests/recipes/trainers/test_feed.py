"""What trainers get in place of a loader stops and resumes anywhere, whichever loader it is."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from penstock_loader_suite import LoaderCase, LoaderSuite, split_items
from penstock_test_parts import Numbers, numbered_source, with_noise

from penstock import Loader, Plan, RunOptions, Segments, Shuffle, World
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.recipes.trainers.feed import Feed


def loader_of_a_pass(items: int, batch_size: int, seed: int, **options: Any) -> Loader:
    source = numbered_source(items)
    plan = Plan(source.index, Shuffle(), batch_size, seed, tail="short")
    return Loader(source, plan, transform=with_noise, **options)


def loader_of_segments(items: int, batch_size: int, seed: int, **options: Any) -> Loader:
    source = numbered_source(items)
    plan = Segments(Plan(source.index, Shuffle(), batch_size, seed), 12)
    return Loader(source, plan, transform=with_noise, **options)


def loader_of_chunks(items: int, batch_size: int, seed: int, **options: Any) -> ChunkedDataLoader:
    return ChunkedDataLoader(Numbers(items), batch_size, 12, seed=seed, **options)


LOADERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "a pass": (loader_of_a_pass, "any"),
    "segments": (loader_of_segments, "refused"),
    "chunks": (loader_of_chunks, "refused"),
}


def exactly_as_many(feed: Feed) -> Iterator[list[Any]]:
    """Yield the batches that a trainer takes: it knows how many an epoch has, and asks for no more."""
    return (split_items(batch) for batch in islice(feed, len(feed)))


class TestFeed(LoaderSuite):
    @pytest.fixture(params=LOADERS)
    def case(self, request: pytest.FixtureRequest) -> LoaderCase:
        make_loader, batch_size = LOADERS[request.param]
        chunked = make_loader is loader_of_chunks

        def make(*, items: int = 24, batch_size: int = 2, seed: int = 1, **options: Any) -> Feed:
            loader = make_loader(items, batch_size, seed, **options)
            return Feed(loader, options.get("world", World()).size)

        threads = {"num_workers": 2, "options": RunOptions(executor="threads")}
        return LoaderCase(
            make,
            {"the seed changed from 2 to 1": {"seed": 2}, "the number of items changed from 26": {"items": 26}},
            ({"num_workers": 1} if chunked else threads,),
            ranks=True,
            batch_size=batch_size,
            epoch=exactly_as_many,
            set_epoch=Feed.go_to,
            resumes_after_break=chunked,
        )


@pytest.mark.parametrize("name", LOADERS)
def test_a_feed_says_what_was_delivered_of_its_epoch(name: str) -> None:
    feed = Feed(LOADERS[name][0](24, 2, 1))
    counts = [feed.delivered for _ in islice(feed, 5)]
    assert counts == [1, 2, 3, 4, 5]
    again = Feed(LOADERS[name][0](24, 2, 1))
    again.load_state_dict(feed.state_dict())
    assert (again.delivered, again.epoch, again.place()["batch"]) == (5, 0, 5)
    assert [again.delivered for _ in again] == [6, 7, 8, 9, 10, 11, 12]
