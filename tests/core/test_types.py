"""Spans, fields, windows and draws."""

import numpy as np
import pytest

from penstock.core.errors import OptionError
from penstock.core.types import Draw, Field, Span, Window


def test_a_span_has_the_items_from_start_up_to_stop() -> None:
    assert len(Span(3, 7)) == 4
    assert len(Span(5, 5)) == 0


@pytest.mark.parametrize(("start", "stop"), [(4, 3), (-1, 3), (-3, -1)])
def test_a_span_that_runs_backwards_or_below_zero_is_refused(start: int, stop: int) -> None:
    with pytest.raises(OptionError, match=rf"must have 0 <= start <= stop, got Span\({start}, {stop}\)"):
        Span(start, stop)


def test_a_span_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Span(0, 1).stop = 5


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (3, 5), 60), ("int16", (), 2), ("float64", (0, 4), 0), ("float32", None, None), ("O", (2,), None)],
)
def test_item_bytes_is_none_if_the_bytes_vary(dtype: str, shape: tuple[int, ...] | None, nbytes: int | None) -> None:
    assert Field(np.dtype(dtype), shape).item_bytes == nbytes


def test_a_window_has_the_items_of_all_its_spans_and_a_key_of_epoch_number_and_cut() -> None:
    window = Window(epoch=2, number=5, spans=np.array([[0, 3], [10, 14]]))
    assert len(window) == 7
    assert window.key == (2, 5, None)
    assert Window(epoch=2, number=5, spans=window.spans, cut_at=40).key == (2, 5, 40)


def test_the_seed_path_of_a_row_is_its_pass_its_item_and_its_visit_if_it_is_not_the_first() -> None:
    items = np.array([7, 9, 7])
    plain = Draw(epoch=3, batch=0, items=items)
    across = Draw(epoch=3, batch=0, items=items, epochs=np.array([4, 4, 5]))
    repeated = Draw(epoch=3, batch=0, items=items, visits=np.array([0, 0, 2]))
    assert [plain.seed_path(row) for row in range(3)] == [(3, 7), (3, 9), (3, 7)]
    assert [across.seed_path(row) for row in range(3)] == [(4, 7), (4, 9), (5, 7)]
    assert [repeated.seed_path(row) for row in range(3)] == [(3, 7), (3, 9), (3, 7, 2)]
    assert len(plain) == 3


def test_a_span_may_start_at_the_first_item() -> None:
    assert (Span(0, 0).start, len(Span(0, 1))) == (0, 1)


def test_a_draw_takes_items_directly_and_once_by_default() -> None:
    draw = Draw(epoch=0, batch=0, items=np.arange(2))
    assert (draw.parts, draw.mask, draw.epochs, draw.visits) == ((), None, None, None)


def test_the_typical_size_of_items_makes_no_other_field() -> None:
    known = Field(np.dtype("float32"), None, typical_bytes=80)
    assert known == Field(np.dtype("float32"), None)
    assert repr(known) == "Field(dtype=dtype('float32'), shape=None)"
