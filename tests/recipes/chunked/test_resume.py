"""Chunks stop and resume anywhere, with other workers and ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
from penstock_loader_suite import LoaderCase, LoaderSuite
from penstock_test_parts import Numbers

from penstock.recipes.chunked.loader import ChunkedDataLoader, ChunkedSampler


def make_loader(*, items: int, batch_size: int = 2, chunk_size: int = 12, **options: Any) -> ChunkedDataLoader:
    return ChunkedDataLoader(Numbers(items), batch_size, chunk_size, **{"seed": 1, **options})


class TestChunkedDataLoader(LoaderSuite):
    @pytest.fixture(params=[True, False], ids=["an endless stream", "passes"])
    def case(self, request: pytest.FixtureRequest) -> LoaderCase:
        shuffle, items = request.param, 30 if request.param else 72

        def make(**options: Any) -> ChunkedDataLoader:
            return make_loader(**{"shuffle": shuffle, "items": items, **options})

        return LoaderCase(
            make,
            {
                "the seed changed from 2 to 1": {"seed": 2},
                "the order changed": {"shuffle": not shuffle},
                "the number of items changed from 26": {"items": 26},
                "the segment length": {"chunk_size": 4},
            },
            ({"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True},),
            ranks=True,
            batch_size="refused",
            set_epoch=ChunkedDataLoader.set_chunk,
            resumes_after_break=True,
        )


def chunks(sampler: ChunkedSampler) -> Iterator[list[int]]:
    items = list(sampler)
    sampler.advance_chunk()
    yield items


class TestChunkedSampler(LoaderSuite):
    """The sampler counts whole chunks: its loader counts batches."""

    @pytest.fixture
    def case(self) -> LoaderCase:
        def make(*, items: int = 30, chunk: int = 8, **options: Any) -> ChunkedSampler:
            return ChunkedSampler(items, chunk, **{"seed": 1, **options})

        return LoaderCase(
            make,
            {
                "the seed changed from 2 to 1": {"seed": 2},
                "the order changed": {"shuffle": False},
                "the number of items changed from 26": {"items": 26},
                "the segment length": {"chunk": 4},
            },
            epoch=chunks,
            set_epoch=ChunkedSampler.set_chunk,
            counts_batches=False,
        )
