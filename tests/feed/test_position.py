"""A position counts what the last iteration delivers, and nothing else."""

import pytest

from penstock import Index, OptionError, Plan, ResumeError, Segments, Sequential, World
from penstock.feed.position import Position
from penstock.plan import Cursor

PLAN = Plan(Index.uniform(24), Sequential(), batch_size=4)  # six batches


def position(cursor: Cursor = Cursor(), world: World = World()) -> Position:  # noqa: B008
    made = Position(PLAN, world)
    made.go_to(cursor)
    return made


def test_it_starts_at_the_first_batch_of_the_first_epoch() -> None:
    at = Position(PLAN, World())
    assert (at.cursor, at.epoch, at.next_epoch, len(at), at.remaining, at.delivered) == (Cursor(), 0, 0, 6, 6, 0)


def test_a_delivery_counts_steps_of_all_ranks_and_the_end_is_the_next_epoch() -> None:
    at = position(world=World(1, 2))
    delivery = at.begin()
    for done in (1, 2, 3):
        delivery.count()
        assert (at.cursor, at.remaining, at.delivered) == (Cursor(0, 2 * done), 3 - done, done)
    assert (at.epoch, at.next_epoch) == (0, 1)
    delivery.finish()
    assert (at.cursor, at.next_epoch, at.remaining) == (Cursor(1), 1, 3)


def test_a_delivery_does_not_count_after_the_position_was_moved() -> None:
    moves = (
        lambda at: at.go_to(Cursor(3, 2)),
        lambda at: at.load_state_dict(Cursor(3, 2).state(PLAN)),
        lambda at: (at.set_epoch(3), at.skip(2)),
        lambda at: (at.set_epoch(3), at.skip(2), at.begin()),
    )
    for move in moves:
        at = position()
        delivery = at.begin()
        delivery.count()
        move(at)
        delivery.count()
        assert at.cursor == Cursor(3, 2)
        delivery.finish()
        assert at.cursor == Cursor(3, 2)


@pytest.mark.parametrize(("counted", "begun", "finished"), [(0, 0, 0), (1, 1, 0), (5, 1, 0), (6, 1, 1)])
def test_epochs_are_left_once_begun_or_once_finished(counted: int, begun: int, finished: int) -> None:
    for leave, epoch in ((Position.leave_begun, begun), (Position.leave_finished, finished)):
        at = position()
        delivery = at.begin()
        for _ in range(counted):
            delivery.count()
        leave(at)
        assert at.cursor == (Cursor(1) if epoch else Cursor(0, counted))


def test_a_loaded_position_is_not_begun_and_an_epoch_without_batches_is_never_finished() -> None:
    at = position(Cursor(2, 3))
    at.leave_begun()
    at.leave_finished()
    assert (at.cursor, at.next_epoch) == (Cursor(2, 3), 2)
    empty = Position(Plan(Index.uniform(3), Sequential(), batch_size=4, tail="drop"), World())
    empty.leave_finished()
    assert (empty.epoch, len(empty), empty.remaining) == (0, 0, 0)


@pytest.mark.parametrize(("n", "cursor"), [(0, Cursor(1, 4)), (2, Cursor(1, 6)), (3, Cursor(2, 1)), (14, Cursor(3, 6))])
def test_skipping_goes_through_the_ends_of_epochs(n: int, cursor: Cursor) -> None:
    at = position(Cursor(1, 4))
    at.skip(n)
    assert at.cursor == cursor


def test_an_epoch_is_set_unless_the_position_was_loaded_in_it() -> None:
    at = position(Cursor(2, 3))
    assert (at.set_epoch(2), at.cursor) == (False, Cursor(2, 3))
    assert (at.set_epoch(1), at.cursor) == (True, Cursor(1))
    at.begin().count()
    assert (at.set_epoch(1), at.cursor) == (True, Cursor(1))
    with pytest.raises(OptionError, match="epoch must be an integer >= 0, got -1"):
        at.set_epoch(-1)
    with pytest.raises(OptionError, match=r"epoch must be an integer >= 0, got 1\.0"):
        at.set_epoch(1.0)  # type: ignore[arg-type]


def test_it_shows_itself() -> None:
    assert repr(position(Cursor(3, 2))) == "<epoch 3: 2 of 6 batches delivered, rank 0>"


@pytest.mark.parametrize(
    ("before", "after"), [(Cursor(), 0), (Cursor(4), 4), (Cursor(4, 1), 5), (Cursor(4, 6), 5), (Cursor(4, 0, 3), 5)]
)
def test_another_plan_starts_at_an_epoch_of_which_nothing_was_delivered(before: Cursor, after: int) -> None:
    other = Segments(PLAN, 2)
    at = position(before)
    state = at.state_dict()
    at.set_plan(other)
    assert (at.plan, at.cursor, len(at)) == (other, Cursor(after), 2)
    with pytest.raises(ResumeError, match="the segment length"):
        at.load_state_dict(state)
    assert at.cursor == Cursor(after)


@pytest.mark.parametrize(
    ("at", "named", "cursors"),
    [
        (Cursor(), (0, 1, 2), (Cursor(), Cursor(1), Cursor(2))),
        (Cursor(), (3, 4), (Cursor(3), Cursor(4))),  # resumed by a new process, at the end of an epoch
        (Cursor(1, 6), (1, 2, 3), (Cursor(2), Cursor(2), Cursor(3))),  # loaded, at the end of an epoch
        (Cursor(1, 6), (2, 3), (Cursor(2), Cursor(3))),
        (Cursor(1, 4), (1, 2), (Cursor(1, 4), Cursor(2))),  # loaded, in the middle of an epoch
        (Cursor(4), (0, 1), (Cursor(4), Cursor(5))),  # set before a new training
        (Cursor(), (0, 1, 0, 5), (Cursor(), Cursor(1), Cursor(), Cursor(5))),  # other trainings
    ],
)
def test_a_position_follows_the_epochs_of_a_trainer(
    at: Cursor, named: tuple[int, ...], cursors: tuple[Cursor, ...]
) -> None:
    followed = position(at)
    for epoch, cursor in zip(named, cursors, strict=True):
        followed.follow(epoch)
        assert followed.cursor == cursor
        delivery = followed.begin()
        for _ in range(followed.remaining if (epoch, cursor) != (1, Cursor(2)) else 0):
            delivery.count()
