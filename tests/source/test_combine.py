from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_source_suite import Case, ShortSuite, SourceSuite
from penstock_test_parts import CountingSource, Numbers, Pairs, numbered_source

from penstock import (
    ArraySource,
    Concat,
    DatasetSource,
    Loader,
    PenstockError,
    Plan,
    Sequential,
    Shuffle,
    Source,
    SourceError,
    Span,
    WindowShuffle,
    Zip,
)
from penstock.source import Take


def arrays(start: int, stop: int, chunk: int = 4) -> ArraySource:
    """Return items numbered from `start`."""
    numbers = np.arange(start, stop)
    return ArraySource({"x": numbers, "y": np.stack([numbers, -numbers], axis=1).astype("f4")}, chunk_items=chunk)


def truth(item: int) -> dict[str, Any]:
    return {"x": np.int64(item), "y": np.array([item, -item], "f4")}


class TestConcat(ShortSuite):
    @pytest.fixture(params=["three", "one", "with empty parts", "of concats", "of takes"])
    def case(self, request: pytest.FixtureRequest) -> Case:
        def make(first: int = 0) -> Source:
            def part(start: int, stop: int) -> ArraySource:
                return arrays(start + first, stop + first)

            nothing = Take(part(0, 9), [])
            return {
                "three": lambda: Concat([part(0, 7), part(7, 8), part(8, 21)]),
                "one": lambda: Concat([part(0, 21)]),
                "with empty parts": lambda: Concat([nothing, part(0, 7), nothing, nothing, part(7, 21), nothing]),
                "of concats": lambda: Concat([Concat([part(0, 3), part(3, 9)]), part(9, 15), Concat([part(15, 21)])]),
                "of takes": lambda: Concat([Take(part(0, 9), range(9)), Take(part(0, 30), range(9, 21))]),
            }[request.param]()

        return Case(make, truth, 21, lambda: make(1))


class TestConcatOfMemoryMaps(ShortSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        def make(first: int = 0) -> Source:
            for n, (start, stop) in enumerate([(0, 7), (7, 20)]):
                np.save(tmp_path / f"{first}-{n}.npy", np.arange(start + first, stop + first, dtype=">i8"))
            return Concat([ArraySource({"x": np.load(tmp_path / f"{first}-{n}.npy", mmap_mode="r")}) for n in (0, 1)])

        return Case(make, lambda item: {"x": np.int64(item)}, 20, lambda: make(1))


class TestConcatOfDatasets(ShortSuite):
    @pytest.fixture
    def case(self) -> Case:
        def make(second: int = 9) -> Source:
            return Concat([DatasetSource(Pairs(7)), DatasetSource(Pairs(second))])

        pairs = Pairs(20)
        return Case(make, lambda item: {"": pairs[item if item < 7 else item - 7]}, 16, lambda: make(10))


class TestZip(ShortSuite):
    @pytest.fixture(params=["two", "one", "with a take"])
    def case(self, request: pytest.FixtureRequest) -> Case:
        def make(first: int = 0) -> Source:
            left = arrays(first, 19 + first)
            right = ArraySource({"z": np.arange(first, 19 + first, dtype="u2") * 3})
            if request.param == "one":
                return Zip([left])
            if request.param == "two":
                return Zip([left, right])
            return Zip([Take(left, range(19)), Concat([right])])

        def zipped(item: int) -> dict[str, Any]:
            return truth(item) if request.param == "one" else {**truth(item), "z": np.uint16(3 * item)}

        return Case(make, zipped, 19, lambda: make(1))


TAKEN = {
    "a run": list(range(5, 25)),
    "every third": list(range(0, 30, 3)),
    "backwards": list(range(29, -1, -1)),
    "with repeats": [7, 7, 2, 29, 7, 0, 1, 2, 3, 4],
    "a mask": [n for n in range(30) if n % 4],
}


class TestTake(ShortSuite):
    @pytest.fixture(params=TAKEN)
    def case(self, request: pytest.FixtureRequest) -> Case:
        items = TAKEN[request.param]
        given: Any = np.isin(np.arange(30), items) if request.param == "a mask" else items
        other = [*items[:-1], (items[-1] + 1) % 30]
        return Case(
            lambda: Take(arrays(0, 30), given),
            lambda n: truth(items[n]),
            len(items),
            lambda: Take(arrays(0, 30), other),
        )


class TestTakeOfADataset(ShortSuite):
    @pytest.fixture
    def case(self) -> Case:
        items, numbers = [8, 3, 3, 11, 0], Numbers(12)
        return Case(
            lambda: Take(DatasetSource(numbers), items),
            lambda n: {"": numbers[items[n]]},
            len(items),
            lambda: Take(DatasetSource(numbers), [8, 3, 3, 11, 1]),
        )


class TestEverythingTogether(SourceSuite):
    @pytest.fixture
    def case(self) -> Case:
        def make(first: int = 0) -> Source:
            whole = Concat([arrays(first, 11 + first), arrays(11 + first, 40 + first)])
            third = ArraySource({"z": np.arange(first, 40 + first)})
            return Take(Zip([whole, third]), np.arange(39, 1, -2))

        def wanted(n: int) -> dict[str, Any]:
            return {**truth(39 - 2 * n), "z": np.int64(39 - 2 * n)}

        return Case(make, wanted, 19, lambda: make(1))


class TestChunksOfCombined:
    @staticmethod
    def sizes(source: Source) -> list[int]:
        return source.index.chunk_sizes(np.arange(source.index.n_chunks)).tolist()

    def test_concat_keeps_the_chunks_of_its_sources(self) -> None:
        assert self.sizes(Concat([arrays(0, 9, chunk=4), arrays(9, 14, chunk=3)])) == [4, 4, 1, 3, 2]

    def test_zip_has_the_chunks_of_the_first(self) -> None:
        assert self.sizes(Zip([arrays(0, 9, chunk=4), ArraySource({"z": np.arange(9)})])) == [4, 4, 1]

    def test_take_keeps_chunks_while_items_ascend(self) -> None:
        assert self.sizes(Take(arrays(0, 12, chunk=4), [0, 3, 4, 11])) == [2, 1, 1]

    def test_take_in_any_other_order_has_no_chunks(self) -> None:
        assert self.sizes(Take(arrays(0, 12, chunk=4), [3, 0, 4, 11])) == [1, 1, 1, 1]

    @pytest.mark.parametrize("order", [Sequential(), Shuffle(), WindowShuffle(2)], ids=repr)
    def test_a_loader_over_a_concat_gives_the_plans_items(self, order: Any) -> None:
        source = Concat([arrays(0, 9, chunk=4), arrays(9, 14, chunk=3), arrays(14, 20)])
        plan = Plan(source.index, order, batch_size=6, tail="short")
        with Loader(source, plan) as loader:
            found = [batch["x"].tolist() for batch in loader]
        assert found == [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
        assert sorted(item for batch in found for item in batch) == list(range(20))


class TestReadsOfCombined:
    def test_a_span_within_one_source_is_one_read(self) -> None:
        parts = [CountingSource(arrays(0, 9)), CountingSource(arrays(9, 20))]
        Concat(parts).read(Span(10, 15))
        assert (parts[0].spans, parts[0].taken, parts[1].spans, parts[1].taken) == ([], [], [(1, 6)], [])

    def test_only_the_sources_that_hold_the_items_are_asked(self) -> None:
        parts = [CountingSource(arrays(0, 9)), CountingSource(arrays(9, 20)), CountingSource(arrays(20, 30))]
        Concat(parts).take(np.array([25, 3, 29]))
        assert [part.taken for part in parts] == [[[3]], [], [[5, 9]]]

    def test_a_run_of_a_take_is_one_read(self) -> None:
        source = CountingSource(arrays(0, 20))
        Take(source, range(3, 12)).read(Span(2, 6))
        assert (source.spans, source.taken) == ([(5, 9)], [])

    @pytest.mark.parametrize("combine", [lambda a, b: Concat([a, b]), lambda a, _: Zip([a]), lambda a, _: Take(a, [0])])
    def test_closing_closes_what_it_is_made_of(self, combine: Callable[..., Source]) -> None:
        first, second = CountingSource(arrays(0, 9)), CountingSource(arrays(9, 20))
        combine(first, second).close()
        assert first.closed == 1


class TestIdentityOfCombined:
    def test_the_order_of_sources_matters(self) -> None:
        a, b = arrays(0, 5), arrays(5, 10)
        assert Concat([a, b]).index.digest != Concat([b, a]).index.digest

    def test_a_concat_of_other_content_is_told_apart(self) -> None:
        assert Concat([arrays(0, 5), arrays(5, 9)]).index.digest != Concat([arrays(0, 5), arrays(6, 10)]).index.digest

    def test_a_zip_of_other_content_in_the_second_is_told_apart(self) -> None:
        def zipped(first: int) -> Zip:
            return Zip([arrays(0, 5), ArraySource({"z": np.arange(first, first + 5)})])

        assert zipped(0).index.digest != zipped(1).index.digest

    def test_a_take_of_other_items_is_told_apart(self) -> None:
        assert Take(arrays(0, 9), [1, 2]).index.digest != Take(arrays(0, 9), [1, 3]).index.digest
        assert Take(arrays(0, 9), [1, 2]).index.digest != Take(arrays(1, 10), [1, 2]).index.digest


class TestBadInput:
    @pytest.mark.parametrize("combine", [Concat, Zip])
    def test_no_sources_are_refused(self, combine: Any) -> None:
        with pytest.raises(SourceError, match="at least one source"):
            combine([])

    @pytest.mark.parametrize(
        "other",
        [
            ArraySource({"x": np.arange(3), "z": np.zeros((3, 2), "f4")}),
            ArraySource({"x": np.arange(3, dtype="i4"), "y": np.zeros((3, 2), "f4")}),
            ArraySource({"x": np.arange(3), "y": np.zeros((3, 3), "f4")}),
            ArraySource({"x": np.arange(3)}),
        ],
        ids=["name", "dtype", "shape", "count"],
    )
    def test_concat_of_different_fields_is_refused_with_both(self, other: Source) -> None:
        with pytest.raises(
            SourceError, match=r"(?s)of Concat.*source 0 has x: int64\[\], y: float32\[2\], but source 1, "
        ):
            Concat([arrays(0, 5), other])

    def test_zip_of_different_lengths_is_refused_with_the_lengths(self) -> None:
        with pytest.raises(SourceError, match=r"\[5, 5, 6\]"):
            Zip([arrays(0, 5), ArraySource({"z": np.arange(5)}), ArraySource({"w": np.arange(6)})])

    def test_zip_of_the_same_name_twice_is_refused_with_the_name(self) -> None:
        with pytest.raises(SourceError, match=r"\['x', 'y'\]"):
            Zip([arrays(0, 5), arrays(5, 10)])

    def test_zip_of_a_dataset_is_refused(self) -> None:
        with pytest.raises(SourceError, match="DatasetSource"):
            Zip([arrays(0, 5), DatasetSource(Numbers(5))])

    @pytest.mark.parametrize("items", [[0, 12], [-1], [3, 99, 4]])
    def test_taking_items_that_are_not_there_is_refused_at_once(self, items: list[int]) -> None:
        with pytest.raises(PenstockError, match=str(min(items) if min(items) < 0 else max(items))):
            Take(arrays(0, 12), items)

    @pytest.mark.parametrize("items", [[0.5, 1.0], [[0, 1]], ["a"], 3], ids=repr)
    def test_taking_what_is_no_item_number_is_refused(self, items: Any) -> None:
        with pytest.raises(SourceError, match="1-d"):
            Take(arrays(0, 12), items)

    def test_a_mask_of_another_length_is_refused_with_both(self) -> None:
        with pytest.raises(SourceError, match=r"one bool per item \(12\), got 3"):
            Take(arrays(0, 12), [True, False, True])

    def test_taking_nothing_is_an_empty_source(self) -> None:
        part = Take(numbered_source(12), [])
        assert len(part.index) == 0
        assert part.take(np.zeros(0, np.int64))["y"].shape == (0, 2)
        assert part.read(Span(0, 0))["x"].dtype == np.int64
