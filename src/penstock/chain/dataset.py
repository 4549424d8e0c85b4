"""`open(x)` and the verbs that follow: choose items, order them, change them, batch them, load them."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from penstock.chain.glance import show_html
from penstock.convert.write import write_source
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, PlanError
from penstock.core.index import Index
from penstock.core.protocols import Order, Source, Transform
from penstock.core.seeds import check_seed
from penstock.core.text import count
from penstock.feed.loader import Loader
from penstock.feed.pad import Pad
from penstock.files.stores.url import Url
from penstock.plan.balanced import Balanced
from penstock.plan.costs import estimate_costs
from penstock.plan.default_order import default_order, default_windows
from penstock.plan.epoch import Tail
from penstock.plan.lengths.near import Bucketed, TokenBudget
from penstock.plan.lengths.packed import Packed
from penstock.plan.orders import Sequential, Shuffle, WindowShuffle
from penstock.plan.plan import Plan
from penstock.recipes.mixture.mixture import Mixture
from penstock.source.combine import Renamed
from penstock.source.find_source import open_source, pass_options
from penstock.source.lengths import has_varying_arrays, item_lengths
from penstock.source.select.selectable import Selectable, Take, check_fields, select_fields
from penstock.transform.compose import Compose, as_transform

__all__ = ["Dataset", "open"]

_LOG = logging.getLogger("penstock")


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
    [[9, 7], [3, 1], [5]]
    """
    return _as_dataset(what, options)


@dataclass(frozen=True, slots=True)
class _Ordering:
    """Which order a verb asked for."""

    verb: str
    order: Order | None
    """None: the one that fits the source."""


@dataclass(frozen=True, slots=True)
class _Batching:
    """Which batches a verb asked for."""

    verb: str
    plan: Callable[[Index, Order, int], Plan]
    """From an index, an order and a seed."""

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

    def fields(self, *names: str | Sequence[str]) -> "Dataset":
        """Keep these fields; the others are not read."""
        self._refuse_after("fields", "map", "batch")
        kept = tuple(name for each in names for name in ([each] if isinstance(each, str) else each))
        select_fields(self.items, kept if self.kept is None else check_fields(self.source, kept))
        return replace(self, kept=kept)

    def rename(self, names: Mapping[str, str]) -> "Dataset":
        """Give fields other names: `rename({"spikes": "counts"})`. Conditions name them by the new ones."""
        self._refuse_after("rename", "map", "batch")
        return replace(self, items=Renamed(self.source, names), kept=None)

    def where(self, condition: "str | Callable[..., ArrayLike] | ArrayLike") -> "Dataset":
        """Keep the items that fulfil a condition over metadata columns, such as `"subject == 'A'"`."""
        self._refuse_after("where", "map", "counted", "batch")
        return replace(self, items=_selectable(self.items).where(condition))

    def sample(self, fraction: float, seed: int = 0) -> "Dataset":
        """Keep a random fraction of the items, the same for the same seed."""
        self._refuse_after("sample", "counted", "batch")
        return replace(self, items=_selectable(self.items).sample(fraction, seed))

    def split(self, *, by: "str | ArrayLike | None" = None, seed: int = 0, **fractions: float) -> "dict[str, Dataset]":
        """Return a dataset for each part, such as `split(train=0.8, val=0.2, by="subject", seed=7)`."""
        self._refuse_after("split", "counted", "batch")
        parts = _selectable(self.items).split(by=by, seed=seed, **fractions)
        return {name: replace(self, items=part) for name, part in parts.items()}

    def sort_by(self, column: str) -> "Dataset":
        """Put the items in ascending order of a column."""
        self._refuse_after("sort_by", "order", "batch")
        return replace(self, items=_selectable(self.items).sort_by(column))

    # -- order and change --------------------------------------------------------------------------------------------

    def shuffle(self, seed: int = 0, *, window: int | None = None) -> "Dataset":
        """Visit every item once per epoch, in another order each time.

        Parameters
        ----------
        window
            Chunks whose items are mixed in memory, as in `WindowShuffle`; a chunk of shards is a shard, unless `open`
            was given `chunk_items`. None: `Shuffle`, or windows of up to 256 MB if chunks must be decoded as a whole,
            such as compressed ones. The order is the same at a path and at a URL.
        """
        if self.ordering is not None and self.ordering.verb == "mix" and window is None:
            return replace(self, seed=check_seed(seed))
        return self._with_order(_Ordering("shuffle", None if window is None else WindowShuffle(window)), seed)

    def balance(
        self,
        by: str,
        seed: int = 0,
        *,
        weights: Mapping[Any, float] | Sequence[float] | None = None,
        length: int | None = None,
    ) -> "Dataset":
        """Visit items so that every value of a column has its exact share of an epoch; see `Balanced`."""
        return self._with_order(_Ordering("balance", Balanced.by(self.items, by, weights, length)), seed)

    def mix(self, others: Mapping[str, Any], weights: Any = None, *, name: str = "first", **options: Any) -> "Dataset":
        """Mix these items, called `name`, with others, each with a weight of its own; see `Mixture`.

        Parameters
        ----------
        others
            Datasets, or anything that `open` takes, by name. They are neither ordered, mapped nor batched yet: each is
            visited in an order of its own, a mixture with its weights. `shuffle(seed)` after `mix` sets the seed.
        weights, options
            `weights`, `stop`, `temperature`, `fields`, … of `Mixture`.
        """
        if name in others:
            raise OptionError(
                f"The datasets of a mixture must have different names, got {name!r} twice: it is that of the one that "
                "mix() is called on. Call that another name with name=..., or the other one."
            )
        parts = {name: self, **{other: _as_dataset(what, {}) for other, what in others.items()}}
        for part in parts.values():
            part._refuse_after("mix", "map", "batch", *([] if isinstance(part.items, Mixture) else ["order"]))
        sources = {other: part.source for other, part in parts.items()}
        mixture = pass_options(Mixture, {"weights": weights, **options}, sources)
        return replace(self, items=mixture, kept=None, ordering=_Ordering("mix", mixture.order))

    def map(self, transform: "Transform | Callable[[Any], Any]") -> "Dataset":
        """Change each item by a function of it, or by a transform `(item, rng)`."""
        self._refuse_after("map", "batch")
        return replace(self, steps=(*self.steps, as_transform(transform)))

    # -- batch and load ----------------------------------------------------------------------------------------------

    def batch(self, size: int, *, tail: Tail = "short", lanes: int = 1) -> "Dataset":
        """Make batches of `size` items; `tail` and `lanes` are those of `Plan`."""
        check_integer("size", size, at_least=1, error=PlanError)
        self._refuse_after("batch", "batch")
        plan = lambda index, order, seed: Plan(index, order, size, seed, lanes, tail)  # noqa: E731
        return replace(self, batching=_Batching("batch", plan))

    def bucket(self, size: int, *, by: str | ArrayLike, pad: Pad | None = None, **options: Any) -> "Dataset":
        """Make batches of `size` items of near lengths; `options` are those of `Bucketed`."""
        return self._by_length("bucket", Bucketed, by, pad, {"batch_size": size, **options})

    def budget(self, max_tokens: int, *, by: str | ArrayLike, pad: Pad | None = None, **options: Any) -> "Dataset":
        """Make batches of as many items as fit a budget after padding; `options` are those of `TokenBudget`."""
        return self._by_length("budget", TokenBudget, by, pad, {"max_tokens": max_tokens, **options})

    def pack(self, length: int, size: int, *, by: str | ArrayLike, pad: Pad | None = None, **options: Any) -> "Dataset":
        """Make batches of `size` rows, each of `length` tokens of several items; `options` are those of `Packed`."""
        return self._by_length("pack", Packed, by, pad, {"length": length, "batch_size": size, **options})

    @property
    def source(self) -> Source:
        """Reads the items that were chosen, with the fields that were kept."""
        return self.items if self.kept is None else select_fields(self.items, self.kept)

    @property
    def order(self) -> Order:
        """The order of the items: `Sequential` if none was asked for."""
        if self.ordering is None:
            return Sequential()
        return default_order(self.source) if self.ordering.order is None else self.ordering.order

    @property
    def plan(self) -> Plan:
        """Says which items each batch holds."""
        if self.batching is None:
            raise PlanError("A plan needs batches: say how large they are with batch(size).")
        if not len(self.source.index):
            raise PlanError(f"A plan needs at least one item, but none is left in {self.source!r}.")
        return self.batching.plan(self.items.index, self.order, self.seed)

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
        options = {"num_workers": num_workers, **options}
        loader = pass_options(Loader, options, self.source, self.plan, transform=self.transform)
        if self.ordering == _Ordering("shuffle", None):
            _log_requests(self.source, loader.plan)
        return loader

    def write(self, output: "str | os.PathLike[str] | Url", **options: Any) -> dict[str, Any]:
        """Write the items as shards, in their order in storage or by `sort_by`, each changed by what `map` was given.

        `options` are those of `penstock.convert.write_source`: `workers`, `shard_size`, `resume`, `overwrite`, ….
        """
        self._refuse_after("write", "order", "batch")
        return pass_options(write_source, options, self.source, output, transform=self.transform, seed=self.seed)

    # -- what it is not: what users of other libraries try, and torch's DataLoader would take --------------------------

    def __len__(self) -> int:
        raise TypeError(
            f"A Dataset has no length, because items and batches are not the same: it has "
            f"{count(len(self.items.index), 'item')}, len(dataset.source.index); len(dataset.loader()) counts batches."
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"A Dataset is not iterated, its loader is: `for batch in {self._name_loader()}`.")

    def __getitem__(self, item: Any) -> Any:
        raise TypeError(
            f"A Dataset has no [{item!r}]: dataset.source.take([0]) reads items, dataset.source.columns('name') "
            f"a column, and `for batch in {self._name_loader()}` gives batches."
        )

    def __bool__(self) -> bool:
        return True

    def _name_loader(self) -> str:
        return f"dataset.{'' if self.batching is not None else 'batch(32).'}loader()"

    # -- show --------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join(["Dataset", *(f"  {name:<7} {text}" for name, text in self.describe())])

    def _repr_html_(self) -> str:
        return show_html(self.source, self.describe())

    def describe(self) -> list[tuple[str, str]]:
        """Return the steps as they will run: what they are called, and what they do."""
        source = self.source
        fields = [f"{name} {field.dtype} {field.shape or ''}".strip() for name, field in source.fields.items()]
        rows = [
            ("source", repr(source)),
            ("items", f"{len(source.index):,} of {', '.join(fields)}"),
            *(("map", repr(step)) for step in self.steps),
            ("order", f"{self.order!r}, seed={self.seed}"),
        ]
        if self.batching is None:
            return [*rows, ("batch", "not yet; next: batch(size), then loader()")]
        try:
            plan = self.plan
        except PlanError as error:
            return [*rows, ("batch", str(error))]
        if self.batching.verb == "batch":
            what = f"{count(plan.passes.batch_size, 'item')}, tail={plan.tail!r}"
        else:  # the plan has an order of its own
            rows[-1], what = ("order", f"by length, seed={self.seed}"), str(plan.identity()["order"])
        return [*rows, (self.batching.verb, f"{what}: {count(plan.epoch(0).n_batches, 'batch')} per epoch")]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _with_order(self, ordering: _Ordering, seed: int) -> "Dataset":
        self._refuse_after(ordering.verb, "order", "batch")
        return replace(self, ordering=ordering, seed=check_seed(seed))

    def _by_length(self, verb: str, kind: Any, by: Any, pad: Pad | None, options: dict[str, Any]) -> "Dataset":
        """Return a dataset whose plan knows the lengths of the items, and pads the field that they are of."""
        self._refuse_after(verb, "batch")
        if self.ordering is not None and self.ordering.order is not None:
            raise PlanError(
                f"{verb}() must not follow {self.ordering.verb}(): it orders items by their lengths. Use shuffle(seed)."
            )
        lengths = item_lengths(self.items, by, cache=options.pop("cache", None))
        plan: Plan = pass_options(kind, options, self.items.index, lengths, seed=self.seed)
        pad = Pad(by) if pad is None and isinstance(by, str) and has_varying_arrays(self.source, by) else pad
        return replace(self, batching=_Batching(verb, lambda *_: plan, pad))

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
        if "counted" in stages and self.ordering is not None and self.ordering.verb in ("balance", "mix"):
            first = "on the datasets that are mixed, before mix()" if self.ordering.verb == "mix" else "first"
            raise PlanError(
                f"{verb}() must not follow {self.ordering.verb}(), which counts the items. Call it {first}."
            )
        if "map" in stages and self.steps:
            raise PlanError(f"{verb}() must not follow map(): it chooses what is read, before that. Call it first.")


def _log_requests(source: Source, plan: Plan) -> None:
    """Say what a full shuffle costs at a URL, if windows of chunks cost less."""
    if getattr(source, "is_remote", False) is not True or not isinstance(plan, Plan) or plan.order != Shuffle():
        return
    windows = default_windows(source)
    n_bytes = getattr(source, "stored_bytes", None) or 0
    each, fewer = (
        estimate_costs(replace(plan, order=order).passes, 0, stored_bytes=n_bytes, cache_bytes=0).first.requests
        for order in (plan.order, windows)
    )
    if 2 * fewer <= each:
        _LOG.warning(
            "A full shuffle takes items one by one: about %s from the URL in each epoch without a cache, of zarr "
            "for whole chunks. shuffle(seed, window=%s) takes about %s, and holds %s of %s in memory%s. It is another "
            "order; both are the same at a path and at a URL.",
            count(each, "request"), windows.window, f"{fewer:,}", count(windows.window, "chunk"),
            count(source.index.usual_chunk, "item"),
            "" if windows.held else "; chunk_items=64 in open() makes smaller chunks of shards",
        )  # fmt: skip


_BATCHES = ("batch", "bucket", "budget", "pack")


def _as_dataset(what: Any, options: dict[str, Any]) -> Dataset:
    if isinstance(what, Dataset) and not options:
        return what
    source = open_source(what, **options)
    order = getattr(source, "order", None)  # of a mixture, whose weights mean nothing without it
    return Dataset(source, ordering=None if order is None else _Ordering("mix", order))


def _selectable(source: Source) -> Selectable:
    """Return a source that has selections: a source of the user's own may not inherit them."""
    return source if isinstance(source, Selectable) else Take(source, np.arange(len(source.index)))
