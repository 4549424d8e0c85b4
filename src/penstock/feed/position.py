"""Position: what was delivered, and what comes next. Loaders hold one and count nothing else."""

import logging
from collections.abc import Mapping
from math import gcd
from typing import Any

from penstock.core.cached import cached_property
from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Share
from penstock.plan.plan import Plan
from penstock.plan.world import World

__all__ = ["Delivery", "Position"]

_LOG = logging.getLogger("penstock")
_USE_MODULE = (
    "Pass the loader as PenstockDataModule(train=loader), or val=loader: its position is then in every checkpoint."
)


class Delivery:
    """Counts the batches of one iteration; they count for a position until it moves elsewhere."""

    def __init__(self, plan: Plan, world: World, start: Cursor, *, is_begun: bool = False) -> None:
        self.start = start
        self._plan, self._world = plan, world
        self._steps = 0
        self._is_done = False
        self.is_begun = is_begun
        """Whether its epoch is over when another iteration begins."""

    @cached_property
    def share(self) -> Share:
        """The share of this rank in the rest of the epoch, from the start of this iteration on."""
        return self._plan.epoch(self.start.epoch, self.start.origin).share(self._world, self.start.batch)

    def count(self) -> None:
        """Count one more batch."""
        self._steps += 1
        self.is_begun = True

    def finish(self) -> None:
        """End the epoch."""
        self.is_begun = self._is_done = True

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last counted batch; that of the next epoch if this one is finished."""
        if self._is_done:
            return Cursor(self.start.epoch + 1)
        if not self._steps:
            return self.start
        return Cursor(self.start.epoch, self.share.batch_after(self._steps), self.start.origin)


class Position:
    """Where one rank is in the epochs of a plan: (plan, world, cursor).

    `len(position)` is the number of batches of the whole current epoch on this rank.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self.world, self._has_reported = plan, world, False
        self.go_to(Cursor())

    @property
    def plan(self) -> Plan:
        """Says what the batches hold."""
        return self._plan

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last delivered batch."""
        return self._delivery.cursor

    @property
    def epoch(self) -> int:
        """The current epoch; the next one as soon as an iteration has reached the end of this one."""
        return self.cursor.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch that follows if an epoch that was begun is not resumed."""
        return self._delivery.start.epoch + self._delivery.is_begun

    def __repr__(self) -> str:
        return f"<epoch {self.epoch}: {self.delivered} of {len(self)} batches delivered, rank {self.world.rank}>"

    def __len__(self) -> int:
        return self._share(Cursor(self.epoch)).n_steps

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch on this rank."""
        return self.share().n_steps

    @property
    def delivered(self) -> int:
        """Batches of the current epoch that were delivered on this rank, including those before a resume."""
        return len(self) - self.remaining

    def share(self) -> Share:
        """Return the share of this rank in the rest of the current epoch."""
        return self._share(self.cursor)

    def _share(self, cursor: Cursor) -> Share:
        return Delivery(self._plan, self.world, cursor).share

    # -- moving --------------------------------------------------------------------------------------------------------

    def go_to(self, cursor: Cursor) -> None:
        """Continue at `cursor`; what an iteration in progress still delivers does not count."""
        self._followed: int | None = None  # the epoch that a trainer named last
        self._is_placed = cursor != Cursor()
        self._move(cursor)

    def _move(self, cursor: Cursor) -> None:
        self._delivery = Delivery(self._plan, self.world, cursor)

    def begin(self, *, is_begun: bool = False) -> Delivery:
        """Return a count for an iteration over the rest of the current epoch."""
        self._delivery = Delivery(self._plan, self.world, self.cursor, is_begun=is_begun)
        return self._delivery

    def leave_begun(self) -> None:
        """Go to the next epoch if a batch of this one was delivered since the position was set."""
        if self._delivery.is_begun:
            self._is_placed = False
            self._move(Cursor(self.next_epoch))

    def leave_finished(self) -> None:
        """Go to the next epoch if all batches of this one were delivered, but none was asked for after the last."""
        if len(self) and not self.remaining:
            self._move(Cursor(self.epoch + 1))

    def report_left_behind(self) -> None:
        """Log, once, which batches are not delivered because an epoch was left early, and how to get them."""
        left = self.remaining if self._delivery.is_begun and self.delivered else 0
        if not left or self._has_reported:
            return
        self._has_reported = True
        _LOG.warning(
            "Epoch %s was left after %s of %s batches: the other %s are left behind, and epoch %s begins. To resume an "
            "epoch that was left, call loader.load_state_dict(loader.state_dict()) before the next loop.",
            self.epoch, self.delivered, len(self), left, self.epoch + 1,
        )  # fmt: skip

    def set_epoch(self, epoch: int) -> bool:
        """Go to the start of `epoch`, unless it is a loaded position in that epoch; return whether it moved."""
        epoch = check_integer("epoch", epoch, at_least=0)
        if not self._delivery.is_begun and self.epoch == epoch:
            return False
        self.go_to(Cursor(epoch))
        return True

    def follow(self, epoch: int) -> bool:
        """Go to the start of `epoch`, which a trainer with a loop of its own names before it begins or resumes it.

        The epoch after the one named last is the next one here, too, and a loaded state is resumed: a trainer that was
        resumed may count differently. Returns whether an iteration of which nothing was delivered must begin elsewhere.
        """
        before, is_begun, at = self._followed, self._delivery.is_begun, self.cursor
        self._followed = epoch
        if self._is_placed and not is_begun:
            self._is_placed = False
            if self.remaining and epoch not in (0, at.epoch):
                raise LoaderError(
                    f"Trainer and loader must be at the same epoch, got {epoch} and {at.epoch} (batch {self.delivered} "
                    f"of {len(self)}). {_USE_MODULE}"
                )
            self.leave_finished()
        elif before is not None and epoch == before + 1:
            if self.delivered:
                self.report_left_behind()
                self._move(Cursor(at.epoch + 1))
        elif is_begun or at.epoch != epoch:
            per_pass = self._plan.epochs_per_pass or 1
            if before is not None and epoch > before and gcd(epoch - before, per_pass) > 1:
                raise LoaderError(
                    f"A pass is {per_pass} epochs, some of which would never come: a trainer named epoch {epoch} after "
                    f"epoch {before}, as with check_val_every_n_epoch={epoch - before}. {_USE_MODULE}"
                )
            self._move(Cursor(epoch))
        return not is_begun and self.cursor != at

    def set_plan(self, plan: Plan) -> None:
        """Take another plan, at the start of the current epoch; of the next one if some of it was delivered."""
        cursor, self._plan = self.cursor, plan
        self.go_to(Cursor(cursor.epoch + bool(cursor.batch or cursor.origin)))

    def skip(self, n: int) -> None:
        """Move `n` batches of this rank further, also into later epochs."""
        cursor, share = self.cursor, self.share()
        while n > share.n_steps:
            following = Cursor(cursor.epoch + 1)
            if not self._share(following).n_steps:
                raise OptionError(f"skip({n}) goes past the last batch: epoch {following.epoch} has no batches.")
            n -= share.n_steps
            cursor, share = following, self._share(following)
        self._move(Cursor(cursor.epoch, share.batch_after(n), cursor.origin))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch: small, plain JSON, the same on every rank."""
        return self.cursor.state(self._plan)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; raise ResumeError if it belongs to another plan."""
        self.go_to(Cursor.restore(state, self._plan))
