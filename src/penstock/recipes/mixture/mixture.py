"""Mixture: several sources as one, and the order in which a plan visits them."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer, check_keys, check_number
from penstock.core.errors import PlanError, SourceError
from penstock.core.index import Index
from penstock.core.protocols import Order, Source
from penstock.core.types import Block, Field, Span
from penstock.plan.mixed.order import Mixed, MixedPart, Stop
from penstock.plan.mixed.weights import count_weights
from penstock.plan.orders import Shuffle
from penstock.recipes.mixture.align import FieldChoice, align_sources
from penstock.source.combine import Concat
from penstock.source.select.selectable import Selectable, check_fields
from penstock.source.wrapper import Wrapper

__all__ = ["Mixture"]

_Int64s = NDArray[np.int64]

Weights = Mapping[str, float] | Sequence[float]
Phases = tuple[tuple[int, tuple[int, ...]], ...]
"""First step, and weight of each source from there on."""


class Mixture(Selectable, Wrapper):
    """Several sources as one, each with its weight of every batch: a source, and `order` for the plan.

    Of the first n items of the training, a source of weight w has w x n, to within one item, for every n, over all
    epochs, workers and ranks. A source visits its items in rounds, each in an order of its own: no item comes again
    before all others of its source have come, also from one epoch to the next.

    The field `source` of every item is the number of its source in `names`. Items without named fields (of a
    `DatasetSource`) get it as the key `source` if they are mappings, and as a last element otherwise.

    Parameters
    ----------
    sources
        Sources by name, of any kind. One may be a mixture itself.
    weights
        Weight of each source, by name or in the order of `sources`: numbers > 0, of which only the ratios count. Or by
        step, `{0: {...}, 10_000: {...}}`: each holds from its step on. None: in proportion to the
        numbers of items. Weights are used as fractions with a common denominator of at most 32,768; `weights` shows
        them.
    stop
        Where an epoch ends. `"first"`: before a source would begin its second round, so that the first epoch has no
        item twice. `"all"`: when every source has been visited once; smaller ones go round again. A number: after so
        many items.
    temperature
        In place of `weights`: in proportion to `n_items ** (1 / temperature)`. 1: as many items as there are; larger
        ones visit small sources more often.
    fields
        `"common"`: the fields that all sources have. `"union"`: those that any of them has; zeros (None if the shape
        varies) where a source has none, and `NAME_mask` is False there. Names by source and field,
        `{"a": {"image": "x"}}`: rename them first, then the common ones.
    orders
        Order in which a round visits the items of a source, by name; `Shuffle()` for the others, and its own for a
        mixture. Windows of a `WindowShuffle` are not held in memory: items are taken one by one.
    homogeneous
        Whether each batch has items of one source only. Weights are then those of batches, all batches are full, and
        `stop` is met in whole batches.
    items_per_step
        With weights by step: items of a step on all ranks together, ranks x batch size. None: one batch of the plan,
        which is a step of a training with one rank.

    Examples
    --------
    >>> from penstock import ArraySource, Loader, Plan
    >>> a, b = ArraySource({"x": np.arange(8)}), ArraySource({"x": np.arange(100, 140), "y": np.ones(40)})
    >>> mixture = Mixture({"a": a, "b": b}, weights={"a": 0.25, "b": 0.75})
    >>> plan = Plan(mixture.index, mixture.order, batch_size=8, seed=7)
    >>> with Loader(mixture, plan) as loader:
    ...     batch = next(iter(loader))
    >>> batch["source"].tolist(), batch["x"].tolist()
    ([1, 1, 0, 1, 1, 1, 0, 1], [129, 102, 0, 106, 138, 120, 6, 135])
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Weights | Mapping[int, Weights] | None = None,
        stop: Stop = "first",
        *,
        temperature: float | None = None,
        fields: FieldChoice = "common",
        orders: Mapping[str, Order] | None = None,
        homogeneous: bool = False,
        items_per_step: int | None = None,
    ) -> None:
        _check_sources(sources)
        self.names = tuple(sources)
        """Names of the sources; the field `source` is the place in it."""
        self._sources = self._whole = Concat(align_sources(sources, fields))
        self._parts = (self._sources,)
        self.fields: Mapping[str, Field] = self._sources.fields
        phases = _parse_weights(weights, temperature, {name: len(source.index) for name, source in sources.items()})
        if items_per_step is not None and len(phases) == 1:
            raise PlanError(
                f"items_per_step={items_per_step!r} needs weights by step, such as {{0: {{...}}, 10_000: {{...}}}}."
            )
        rounds = _check_orders(orders, sources)
        parts = tuple(MixedPart(name, source.index, rounds[name]) for name, source in sources.items())
        self.order = Mixed(parts, phases, stop, homogeneous, items_per_step)
        """The order of a plan over this mixture."""
        self.index = _join_indexes(parts)
        self.order.check_parts()

    def __repr__(self) -> str:
        weights = self.order.phases[0][1]
        shown = ", ".join(f"{name} {weight}/{sum(weights)}" for name, weight in zip(self.names, weights, strict=True))
        return f"Mixture({len(self.index)} items of {', '.join(self.fields) or 'object'}: {shown})"

    @property
    def weights(self) -> dict[str, Fraction] | dict[int, dict[str, Fraction]]:
        """The weights that are used, as exact fractions: by name, or by step and name."""
        found = {
            step: {name: Fraction(count, sum(counts)) for name, count in zip(self.names, counts, strict=True)}
            for step, counts in self.order.phases
        }
        return found if len(found) > 1 else found[0]

    def rounds(self, epochs: int = 1) -> dict[str, float]:
        """Return how often each source has been visited as a whole at the end of so many epochs.

        With homogeneous batches, or weights by step, that depends on the plan: ask `plan.order.rounds(epochs)`.
        """
        return self.order.rounds(epochs)

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items: those of the first source, then those of the second, and so on."""
        return self._sources.read(span, out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, each from its own source."""
        return self._sources.take(items, out)

    def with_fields(self, fields: Sequence[str]) -> "Mixture":
        """Return the same mixture with these fields, of all that it has: the sources read no others."""
        other = copy.copy(self)
        other._sources = self._whole.with_fields(check_fields(self._whole, fields))
        other._parts, other.fields = (other._sources,), other._sources.fields
        return other

    @property
    def stored_fields(self) -> Mapping[str, Field]:
        """All fields of the mixture, also those that are not delivered."""
        return self._whole.fields


def _check_sources(sources: Any) -> None:
    """Raise SourceError if these are not one or more sources with items, by name."""
    if not isinstance(sources, Mapping) or not sources:
        raise SourceError(
            f"sources must be sources by name, such as {{'a': source_a, 'b': source_b}}, got {sources!r}."
        )
    for name, source in sources.items():
        if not isinstance(name, str) or not name:
            raise SourceError(f"The name of a source must be a string, got {name!r}.")
        if isinstance(source, type) or not all(hasattr(source, member) for member in ("index", "fields", "take")):
            raise SourceError(
                f"Source {name!r} must be a source, such as ArraySource or TarSource, got {type(source).__name__}. "
                "DatasetSource makes one of a torch dataset."
            )
        if not len(source.index):
            raise SourceError(f"Source {name!r} must have at least one item, got {source!r} with none; leave it out.")


def _parse_weights(
    weights: Weights | Mapping[int, Weights] | None, temperature: float | None, sizes: Mapping[str, int]
) -> Phases:
    """Return the weights of each phase as integers.

    Parameters
    ----------
    sizes
        Items of each source, by name.
    """
    if weights is None:
        exponent = (
            1.0 if temperature is None else 1 / check_number("temperature", temperature, above=0, error=PlanError)
        )
        logs = exponent * np.log(np.array(list(sizes.values()), np.float64))
        return ((0, count_weights(list(sizes.values()) if exponent == 1 else np.exp(logs - logs.max()).tolist())),)
    if temperature is not None:
        raise PlanError(
            f"temperature={temperature!r} makes the weights from the sizes of the sources. Use it without weights=..."
        )
    if not isinstance(weights, Mapping) or not any(_is_schedule(weight) for weight in weights.values()):
        return ((0, _count(weights, sizes)),)
    steps = [check_integer("A step of weights", step, at_least=0, error=PlanError) for step in weights]
    if min(steps) > 0:
        raise PlanError(f"weights by step must begin at step 0, got {min(steps)} as the first one.")
    given = dict(zip(steps, weights.values(), strict=True))
    return tuple((step, _count(given[step], sizes, f" from step {step} on")) for step in sorted(steps))


def _is_schedule(weight: Any) -> bool:
    """Return whether what is given for a key are weights of all sources, and the key is a step therefore."""
    return isinstance(weight, Mapping | list | tuple) or np.ndim(weight) > 0


def _count(weights: Any, sizes: Mapping[str, int], when: str = "") -> tuple[int, ...]:
    names = list(sizes)
    if isinstance(weights, Mapping):
        check_keys(f"Names in weights{when}", map(str, weights), names, error=PlanError)
        missing = [name for name in names if name not in weights]
        if missing:
            raise PlanError(f"weights{when} must have one weight per source, but {missing[0]!r} has none.")
        weights = [weights[name] for name in names]
    if isinstance(weights, str) or not isinstance(weights, Sequence | np.ndarray) or len(weights) != len(names):
        raise PlanError(
            f"weights{when} must have one weight per source ({', '.join(map(repr, names))}), by name or in their "
            f"order, got {weights!r}."
        )
    for name, weight in zip(names, weights, strict=True):
        check_number(f"The weight of {name!r}{when}", weight, above=0, error=PlanError)
    return count_weights([float(weight) for weight in weights])


def _check_orders(orders: Any, sources: Mapping[str, Source]) -> dict[str, Order]:
    orders = {} if orders is None else orders
    if not isinstance(orders, Mapping):
        first = next(iter(sources))
        raise PlanError(f"orders must be orders by source, such as {{{first!r}: Sequential()}}, got {orders!r}.")
    check_keys("Names in orders", orders, sources, error=PlanError)
    for name, order in orders.items():
        if isinstance(order, type) or not hasattr(order, "arrange"):
            raise PlanError(f"orders[{name!r}] must be an order such as Shuffle() or Sequential(), got {order!r}.")
    # A mixture among the sources has an order of its own.
    return {name: orders.get(name, getattr(source, "order", Shuffle())) for name, source in sources.items()}


def _join_indexes(parts: tuple[MixedPart, ...]) -> Index:
    content = hashlib.blake2b(digest_size=8)
    for part in parts:
        content.update(repr((part.name, len(part.index), part.index.content_digest)).encode())
    return Index.concat([part.index for part in parts], identity=content.hexdigest())
