"""Tests that every Source must pass: subclass SourceSuite or ShortSuite and define the cases."""

import pickle
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import run_at_once

from penstock import Loader, Plan, ReadError, Shuffle, Source, Span

__all__ = ["Case", "ShortSuite", "SourceSuite", "as_list"]


@dataclass(frozen=True)
class Case:
    """A source, and its expected items."""

    make: Callable[[], Source]
    truth: Callable[[int], Mapping[str, Any]]
    """Item number to the fields of that item."""

    n_items: int
    other: Callable[[], Source]
    """A source of the same kind with other content."""


def as_list(items: list[Any]) -> list[Any]:
    """Collate items to a list."""
    return items


def same(found: Any, wanted: Any) -> bool:
    """Return whether two items are equal in type, dtype and every bit."""
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray | np.generic):
        found, wanted = np.asarray(found), np.asarray(wanted)
        return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
    if isinstance(wanted, Mapping):
        return set(found) == set(wanted) and all(same(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, tuple | list):
        equal = len(found) == len(wanted) and all(same(a, b) for a, b in zip(found, wanted, strict=True))
        return type(found) is type(wanted) and equal
    return type(found) is type(wanted) and bool(found == wanted)


class SourceSuite:
    """Subclasses define the fixture `case`."""

    @pytest.fixture
    def source(self, case: Case) -> Any:
        source = case.make()
        yield source
        source.close()

    @staticmethod
    def check(case: Case, block: Mapping[str, Any], items: Any) -> None:
        for name in case.truth(0):
            assert len(block[name]) == len(items)
            for row, item in enumerate(items):
                found, wanted = block[name][row], case.truth(item)[name]
                assert same(found, wanted), f"{name!r} of item {item} is {found!r} instead of {wanted!r}"
        assert set(block) == set(case.truth(0))

    def test_the_index_counts_the_items(self, case: Case, source: Source) -> None:
        assert len(source.index) == source.index.n_stored == case.n_items
        sizes = source.index.chunk_sizes(np.arange(source.index.n_chunks))
        assert sizes.sum() == case.n_items

    def test_read_gives_consecutive_items(self, case: Case, source: Source) -> None:
        n = case.n_items
        for start, stop in [(0, n), (0, 1), (n - 1, n), (n // 3, n // 3 + 4), (n // 2, n)]:
            self.check(case, source.read(Span(start, stop)), range(start, stop))

    def test_read_equals_take_of_the_same_items(self, case: Case, source: Source) -> None:
        read, taken = source.read(Span(1, case.n_items)), source.take(np.arange(1, case.n_items))
        for name in source.fields:
            assert read[name].dtype == taken[name].dtype
            assert all(same(a, b) for a, b in zip(read[name], taken[name], strict=True))

    def test_take_gives_items_in_the_given_order_with_repeats(self, case: Case, source: Source) -> None:
        n = case.n_items
        for items in ([n - 1, 0, n // 2, n // 2, 0], [3, 2, 1], [n // 2], list(range(n))[::-1]):
            self.check(case, source.take(np.array(items)), items)

    def test_taking_and_reading_nothing_gives_empty_fields(self, case: Case, source: Source) -> None:
        for block in (source.take(np.zeros(0, np.int64)), source.read(Span(0, 0)), source.read(Span(2, 2))):
            for name, field in source.fields.items():
                assert block[name].dtype == field.dtype
                assert block[name].shape == (0, *(field.shape or ()))

    def test_out_is_filled_and_returned(self, case: Case, source: Source) -> None:
        fixed = {name: field for name, field in source.fields.items() if field.item_bytes is not None}
        if not fixed:
            pytest.skip("this source has no fields of fixed shape")
        items = [case.n_items - 1, 1, 1, 0]
        for fill, wanted in (
            (lambda out: source.take(np.array(items), out), items),
            (lambda out: source.read(Span(1, 5), out), range(1, 5)),
        ):
            # Allocate one more item on each side, to notice writes out of bounds.
            padded = {name: np.zeros((6, *field.shape), field.dtype) for name, field in fixed.items()}
            out = {name: array[1:5] for name, array in padded.items()}
            block = fill(out)
            assert all(block[name] is out[name] for name in out)
            self.check(case, block, wanted)
            for array in padded.values():
                assert array[0].tobytes() == array[5].tobytes() == np.zeros_like(array[0]).tobytes()

    def test_fields_describe_the_returned_arrays(self, case: Case, source: Source) -> None:
        block = source.take(np.array([0, case.n_items - 1]))
        assert set(block) == set(source.fields)
        for name, field in source.fields.items():
            assert block[name].dtype == field.dtype
            assert block[name].dtype.isnative
            if field.shape is not None:
                assert block[name].shape == (2, *field.shape)

    def test_the_returned_arrays_may_be_changed(self, case: Case, source: Source) -> None:
        if any(field.dtype.hasobject for field in source.fields.values()):
            pytest.skip("the items of a dataset are its own objects")
        for block in (source.read(Span(0, 4)), source.take(np.arange(4))):
            for array in block.values():
                array[...] = np.zeros((), array.dtype)
        self.check(case, source.read(Span(0, 4)), range(4))

    def test_a_pickled_source_gives_the_same(self, case: Case, source: Source) -> None:
        source.take(np.array([0]))
        again = pickle.loads(pickle.dumps(source))
        assert again.index.digest == source.index.digest
        assert dict(again.fields) == dict(source.fields)
        self.check(case, again.read(Span(0, case.n_items)), range(case.n_items))
        again.close()

    def test_it_works_after_close(self, case: Case, source: Source) -> None:
        source.close()
        source.close()
        self.check(case, source.take(np.array([2, 0])), [2, 0])
        source.close()
        self.check(case, source.read(Span(1, 3)), [1, 2])

    def test_several_threads_read_at_once(self, case: Case, source: Source) -> None:
        def read(number: int) -> None:
            rng = np.random.default_rng(number)
            for turn in range(8):
                if turn == 4:
                    source.close()
                items = rng.integers(0, case.n_items, 6)
                getattr(source, "prepare", lambda _: None)(items)
                self.check(case, source.take(items), items.tolist())
                getattr(source, "release", lambda _: None)(items)
                start = int(items[0])
                self.check(case, source.read(Span(start, case.n_items)), range(start, case.n_items))

        run_at_once(4, read)

    def test_items_are_the_same_after_they_are_prepared_and_released(self, case: Case, source: Any) -> None:
        n = case.n_items
        prepare, release = (getattr(source, name, lambda _: None) for name in ("prepare", "release"))
        draws = [np.random.default_rng(seed).integers(0, n, size).tolist() for seed, size in enumerate((1, 5, 40))]
        for items in ([], [n - 1, 0, n // 2, n // 2, 0], list(range(n)), *draws):
            missing = prepare(np.array(items, np.int64))
            assert missing is None or missing >= 0
            self.check(case, source.take(np.array(items, np.int64)), items)
            assert release(np.array(items, np.int64)) is None
            self.check(case, source.take(np.array(items, np.int64)), items)
            source.close()
        self.check(case, source.read(Span(0, n)), range(n))
        stored = getattr(source, "stored_bytes", None)
        assert stored is None or stored >= 0

    def test_a_pickled_source_is_prepared_before_its_first_read(self, case: Case, source: Any) -> None:
        again = pickle.loads(pickle.dumps(source))
        for name in ("prepare", "release", "prepare"):
            getattr(again, name, lambda _: None)(np.arange(case.n_items))
        self.check(case, again.read(Span(0, case.n_items)), range(case.n_items))
        again.close()

    def test_taking_items_that_do_not_exist_is_a_read_error(self, case: Case, source: Source) -> None:
        n = case.n_items
        for items in ([-1], [n], [0, -1], [*range(n + 1)], [10 * n + 7]):
            with pytest.raises(ReadError, match=str(items[-1])):
                source.take(np.array(items))

    def test_reading_past_the_end_is_a_read_error(self, case: Case, source: Source) -> None:
        n = case.n_items
        for start, stop in ((n - 1, n + 1), (n, n + 1), (0, n + 9), (10 * n, 10 * n + 2)):
            with pytest.raises(ReadError, match=r"\d"):
                source.read(Span(start, stop))

    def test_the_same_content_has_the_same_identity(self, case: Case, source: Source) -> None:
        assert case.make().index.digest == source.index.digest

    def test_other_content_has_another_identity(self, case: Case, source: Source) -> None:
        assert case.other().index.digest != source.index.digest

    def test_a_loader_over_it_gives_what_the_plan_says(self, case: Case, source: Source) -> None:
        plan = Plan(source.index, Shuffle(), batch_size=3, tail="short")
        with Loader(source, plan, collate=as_list) as loader:
            batches = list(loader)
        assert len(batches) == plan.n_batches
        for n, batch in enumerate(batches):
            for item, found in zip(plan.epoch(0).draw(n).items.tolist(), batch, strict=True):
                wanted = case.truth(item)
                assert same(found, wanted[""] if "" in wanted else dict(wanted))


class ShortSuite:
    """All tests of a suite as one, for kinds of a source that has a kind with a test for each."""

    suite: type[SourceSuite] = SourceSuite

    def test_it_passes_the_suite(self, case: Case) -> None:
        suite = self.suite()
        for name in dir(suite):
            if name.startswith("test_"):
                with closing(case.make()) as source, suppress(pytest.skip.Exception):
                    getattr(suite, name)(case, source)
