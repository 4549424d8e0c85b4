"""`open(x)` and the verbs that follow: choose items, order them, change them, batch them, load them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from penstock.chain.default_order import default_order
from penstock.chain.glance import show_html
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, PlanError
from penstock.core.protocols import Order, Source, Transform
from penstock.core.seeds import check_seed
from penstock.core.text import count
from penstock.feed.loader import Loader
from penstock.plan.balanced import Balanced
from penstock.plan.batch_plan import BatchPlan
from penstock.plan.epoch import Tail
from penstock.plan.orders import Sequential, WindowShuffle
from penstock.plan.plan import Plan
from penstock.source.find_source import open_source
from penstock.source.select.selectable import Selectable, Take, check_fields, select_fields
from penstock.transform.compose import Compose

__all__ = ["Dataset", "open"]


def open(what: Any, **options: Any) -> "Dataset":  # noqa: A001  # `ps.open`, as in other libraries
    """Return a dataset of anything that has items: shards, a URL, zarr, audio, npy files, arrays, a torch dataset, ….

    Parameters
    ----------
    what
        A path, a pattern or a URL; an array, or a mapping of names to arrays; an object with `len` and `[i]`; a source.
        `penstock.source.open_source` lists all of them.
    options
        Those of the source that it becomes, such as `fields=["x"]`, or `cache="/scratch"` of a URL.

    Examples
    --------
    >>> data = open({"x": np.arange(10), "label": np.arange(10) % 2}).where("label == 1").shuffle(seed=7).batch(2)
    >>> with data.loader() as loader:
    ...     [batch["x"].tolist() for batch in loader]
    [[1, 3], [9, 5], [7]]
    """
    return what if isinstance(what, Dataset) else Dataset(open_source(what, **options))


@dataclass(frozen=True, slots=True)
class _Ordering:
    """How items are ordered: by `find`, given the source, when the plan is made."""

    find: Callable[[Any], Order]
    verb: str


@dataclass(frozen=True, slots=True)
class _Batching:
    """How batches are made: by `plan`, given the source, the order and the seed."""

    plan: Callable[[Source, Order, int], BatchPlan]
    verb: str
    collate: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Dataset:
    """Items, and what is done with them until they are batches. A frozen value: each verb returns another one.

    All that it does can be written with a source, a plan and a loader: `source` and `plan` are those. It holds no
    position; the loader that `loader()` returns does.
    """

    items: Source
    """The items that were chosen, with all their fields, which conditions may name."""

    kept: tuple[str, ...] | None = None
    """Names of the fields that are read; None: all."""

    steps: tuple[Transform, ...] = ()
    """Called for each item, one after the other."""

    ordering: _Ordering | None = None
    batching: _Batching | None = None
    seed: int = 0
    """Of the order, and of random transforms."""

    # -- choose ------------------------------------------------------------------------------------------------------

    def fields(self, *names: str) -> "Dataset":
        """Keep these fields; the others are not read."""
        self._refuse_after("fields", "map", "batch")
        select_fields(self.items, list(names) if self.kept is None else check_fields(self.source, names))
        return replace(self, kept=names)

    def where(self, condition: "str | Callable[..., ArrayLike] | ArrayLike") -> "Dataset":
        """Keep the items that fulfil a condition over metadata columns, such as `"subject == 'A'"`."""
        self._refuse_after("where", "map", "balance", "batch")
        return replace(self, items=_selectable(self.items).where(condition))

    def sample(self, fraction: float, seed: int = 0) -> "Dataset":
        """Keep a random fraction of the items, the same for the same seed."""
        self._refuse_after("sample", "balance", "batch")
        return replace(self, items=_selectable(self.items).sample(fraction, seed))

    def split(self, *, by: "str | ArrayLike | None" = None, seed: int = 0, **fractions: float) -> "dict[str, Dataset]":
        """Return a dataset for each part, such as `split(train=0.8, val=0.2, by="subject", seed=7)`."""
        self._refuse_after("split", "balance", "batch")
        parts = _selectable(self.items).split(by=by, seed=seed, **fractions)
        return {name: replace(self, items=part) for name, part in parts.items()}

    # -- order and change --------------------------------------------------------------------------------------------

    def shuffle(self, seed: int = 0, *, window: int | None = None) -> "Dataset":
        """Visit every item once per epoch, in another order each time.

        Parameters
        ----------
        window
            Chunks whose items are mixed in memory, as in `WindowShuffle`. None: `Shuffle`, or windows of up to 256 MB
            if the items are compressed or remote, so that only whole chunks are cheap to read.
        """
        order = None if window is None else WindowShuffle(window)
        return self._with_order("shuffle", lambda source: order or default_order(source), seed)

    def balance(
        self,
        by: str,
        seed: int = 0,
        *,
        weights: Mapping[Any, float] | Sequence[float] | None = None,
        length: int | None = None,
    ) -> "Dataset":
        """Visit items so that every value of a column has its exact share of an epoch; see `Balanced`."""
        order = Balanced.by(self.items, by, weights, length)
        return self._with_order("balance", lambda _: order, seed)

    def map(self, transform: "Transform | Callable[[Any], Any]") -> "Dataset":
        """Change each item by a function of it, or by a transform `(item, rng)`."""
        self._refuse_after("map", "batch")
        return replace(self, steps=(*self.steps, _as_transform(transform)))

    # -- batch and load ----------------------------------------------------------------------------------------------

    def batch(self, size: int, *, tail: Tail = "short", lanes: int = 1) -> "Dataset":
        """Make batches of `size` items; `tail` and `lanes` are those of `Plan`."""
        check_integer("size", size, at_least=1, error=PlanError)

        def plan(source: Source, order: Order, seed: int) -> Plan:
            return Plan(source.index, order, size, seed, lanes, tail)

        return self._with_batches(_Batching(plan, "batch"))

    @property
    def source(self) -> Source:
        """Reads the items that were chosen, with the fields that were kept."""
        return self.items if self.kept is None else select_fields(self.items, self.kept)

    @property
    def order(self) -> Order:
        """The order of the items: `Sequential` if none was asked for."""
        return Sequential() if self.ordering is None else self.ordering.find(self.source)

    @property
    def plan(self) -> BatchPlan:
        """Says which items each batch holds."""
        if self.batching is None:
            raise PlanError("A plan needs batches: say how large they are with batch(size).")
        if not len(self.source.index):
            raise PlanError(f"A plan needs at least one item, but none is left in {self.source!r}.")
        return self.batching.plan(self.source, self.order, self.seed)

    @property
    def transform(self) -> Transform | None:
        """All that `map` was given, as one transform; None if nothing was."""
        return None if not self.steps else self.steps[0] if len(self.steps) == 1 else Compose(self.steps)

    def loader(self, num_workers: int = 0, **options: Any) -> Loader:
        """Return a loader of the batches; `options` are those of `Loader`: `device`, `collate`, `world`, ….

        Close it when the training is over, or use it in a `with` statement.
        """
        if self.batching is not None and self.batching.collate is not None:
            options = {"collate": self.batching.collate, **options}
        return Loader(self.source, self.plan, transform=self.transform, num_workers=num_workers, **options)

    # -- show --------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join(["Dataset", *(f"  {name:<7} {text}" for name, text in self.describe())])

    def _repr_html_(self) -> str:
        return show_html(self.source, self.describe())

    def describe(self) -> list[tuple[str, str]]:
        """Return the steps as they will run: what they are called, and what they do."""
        fields = [f"{name} {field.dtype} {field.shape or ''}".strip() for name, field in self.source.fields.items()]
        rows = [
            ("source", repr(self.source)),
            ("items", f"{len(self.source.index):,} of {', '.join(fields)}"),
            *(("map", repr(step)) for step in self.steps),
            ("order", f"{self.order!r}, seed={self.seed}" if self.ordering is not None else "Sequential()"),
        ]
        if self.batching is None:
            return [*rows, ("batch", "not yet; next: batch(size), then loader()")]
        try:
            plan = self.plan
        except PlanError as error:
            return [*rows, ("batch", str(error))]
        size = f"{count(plan.batch_size, 'item')}, tail={plan.tail!r}"
        return [*rows, (self.batching.verb, f"{size}: {count(plan.epoch(0).n_batches, 'batch')} per epoch")]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _with_order(self, verb: str, find: Callable[[Any], Order], seed: int) -> "Dataset":
        self._refuse_after(verb, "order", "batch")
        return replace(self, ordering=_Ordering(find, verb), seed=check_seed(seed))

    def _with_batches(self, batching: _Batching) -> "Dataset":
        self._refuse_after(batching.verb, "batch")
        return replace(self, batching=batching)

    def _refuse_after(self, verb: str, *stages: str) -> None:
        """Raise PlanError if one of these stages was already reached."""
        if "batch" in stages and self.batching is not None:
            advice = (
                "batches are made once"
                if verb in _BATCHES
                else f"it works on items: call it before {self.batching.verb}()"
            )
            raise PlanError(f"{verb}() must not follow {self.batching.verb}(): {advice}.")
        if "order" in stages and self.ordering is not None:
            raise PlanError(
                f"{verb}() must not follow {self.ordering.verb}(): the items have one order. Leave one out."
            )
        if "balance" in stages and self.ordering is not None and self.ordering.verb == "balance":
            raise PlanError(f"{verb}() must not follow balance(), which counts the items. Call it first.")
        if "map" in stages and self.steps:
            raise PlanError(f"{verb}() must not follow map(): it chooses what is read, before that. Call it first.")


_BATCHES = ("batch", "bucket", "budget", "pack")


class _OfItem:
    """A function of an item alone, as a transform."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, item: Any, _: np.random.Generator, /) -> Any:
        return self.function(item)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def _as_transform(given: Any) -> Transform:
    """Return a transform: what takes an item and a generator, or a function of an item."""
    if not callable(given) or isinstance(given, type):
        raise OptionError(f"map() takes a function of an item, or a transform(item, rng), got {given!r}.")
    try:
        parameters = list(inspect.signature(given).parameters.values())
    except (TypeError, ValueError):  # of a built-in
        parameters = []
    needed = [one for one in parameters if one.default is one.empty and one.kind in _POSITIONAL]
    transform: Transform = given if len(needed) == 2 else _OfItem(given)
    return transform


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _selectable(source: Source) -> Selectable:
    """Return a source that has selections: a source of the user's own may not inherit them."""
    return source if isinstance(source, Selectable) else Take(source, np.arange(len(source.index)))
