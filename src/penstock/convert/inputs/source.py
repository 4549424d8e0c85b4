"""Items of a source as an input: of shards at a path or a URL, or of any source, perhaps changed by a transform."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.core.errors import SourceError
from penstock.core.protocols import Source, Transform
from penstock.core.seeds import generator_for
from penstock.core.types import UNNAMED, Span
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.manifest import METADATA
from penstock.shard.names import automatic_key
from penstock.shard.sample_form import RESERVED_KEYS
from penstock.source.checks import check_items
from penstock.source.select.selectable import as_stored, select_fields
from penstock.source.tar.source import TarSource
from penstock.source.windowed import Windowed
from penstock.transform.read_values import ItemsAhead

__all__ = ["ShardsInput", "SourceInput", "SourceRecording"]

_READ_ITEMS, _READ_METADATA = 32, 1024
_SMALL_BYTES, _READ_BYTES = 1 << 20, 16 << 20  # of small items, and of others, in one call
_CHUNK_BYTES = 256 << 20  # of items of a chunk that is decoded as a whole
_TOLD_BYTES, _MOST_TOLD = 16 << 20, 4096  # that are read ahead at once

_Int64s = NDArray[np.int64]
_OBJECT = np.dtype(object)


@dataclass(frozen=True, slots=True)
class ShardsInput:
    """A folder of shards that Penstock wrote or indexed. Every byte is verified as it is read.

    Images, sounds and the like are copied as they are stored. Items keep ids that are not automatic, unless several
    items of a conversion have the same.
    """

    path: Path | Url
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    is_folder: ClassVar[bool] = True

    def open(self) -> "SourceRecording":
        """Open the shards."""
        # The cache folder is not used: every item is read once.
        store = self.remote.store if isinstance(self.path, Url) and self.remote is not None else None
        source = TarSource(str(self.path), store=store)
        if not {*source.fields} - {METADATA}:
            raise SourceError(f"A dataset must have fields besides metadata to be converted, but {source!r} has none.")
        return SourceRecording(source, {"format": "shards"})


@dataclass(frozen=True, slots=True)
class SourceInput:
    """A source that was opened by the caller, and what changes its items.

    Parameters
    ----------
    path
        The file or folder that names it in messages.
    identity
        What tells its content, fields and transform from others.
    about
        What the manifest says of it.
    paths
        Its files, whose sizes and times must not change during a conversion, or before it is resumed.
    """

    path: Path | Url
    identity: str
    source: Source = field(repr=False, compare=False)
    transform: Transform | None = field(default=None, repr=False, compare=False)
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    paths: tuple[Path | Url, ...] = field(default=(), repr=False, compare=False)
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)

    is_folder: ClassVar[bool] = True

    def open(self) -> "SourceRecording":
        """Return the items; the source opens its files by itself."""
        return SourceRecording(self.source, self.about, self.transform, self.seed, file=self.path.name)


class SourceRecording:
    """The items of a source. Without a transform, files such as images are copied as they are stored."""

    def __init__(
        self,
        source: Source,
        about: Mapping[str, Any],
        transform: Transform | None = None,
        seed: int = 0,
        *,
        file: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self._file = file
        self._source = as_stored(source) if transform is None else source
        fields = list(source.fields)
        if fields == [UNNAMED] and transform is None:  # such as dicts of a torch dataset
            transform = _keep_item
        self._has_metadata = METADATA in fields
        self._names = [name for name in fields if name != METADATA or transform is not None]
        self._transform, self._seed = transform, seed
        self.n_samples = len(source.index)
        self.about: Mapping[str, Any] = {"fields": fields, **about}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = notes

    @property
    def ids(self) -> Sequence[str | None]:
        """The id of each item; None if it is automatic, and empty if items have no metadata."""
        return (
            ()
            if not self._has_metadata
            else [metadata.get("sample_id") for metadata in self.metadata(np.arange(self.n_samples))]
        )

    def metadata(self, numbers: _Int64s) -> Iterator[Mapping[str, Any]]:
        """Yield the metadata of items, without reading fields."""
        if not self._has_metadata:
            yield from self._locate(numbers)
            return
        source = select_fields(self._source, [METADATA])
        for some, block in _read_blocks(source, numbers, _READ_METADATA, _READ_METADATA):
            yield from map(_own_metadata, block[METADATA], some.tolist())

    def span(self, numbers: _Int64s) -> NDArray[np.float64]:
        """Return the first row of each item in the source, and the row after its last."""
        starts = check_items(numbers, self._source)
        stops = starts + 1
        if isinstance(self._source, Windowed):
            starts, stops = self._source.places(starts).values()
        return np.stack([starts, stops], axis=1).astype(np.float64)

    def samples(self, numbers: _Int64s) -> Iterator[Sample]:
        """Yield items in the order of `numbers`."""
        at_once, told = _items_at_once(self._source)
        numbers = np.asarray(numbers, np.int64)
        if self._transform is None and isinstance(self._source, Windowed):  # a copy each: they may overlap
            length, checked = self._source.length, check_items(numbers, self._source)
            for some, (rows, begins) in _read_blocks(self._source, checked, at_once, told, self._source.read_rows):
                for begin, about in zip(begins.tolist(), self._locate(some), strict=True):
                    yield {name: rows[name][begin : begin + length].copy() for name in self._names}, about
            return
        for some, block in _read_blocks(self._source, numbers, at_once, told):
            has_own = METADATA in block
            abouts = map(_own_metadata, block[METADATA], some.tolist()) if has_own else self._locate(some)
            for row, about in enumerate(abouts):
                if self._transform is None:  # a text is an array, too, if its dtype is
                    yield {name: _select(block[name], row) for name in self._names}, about
                    continue
                yield self._change({name: block[name][row] for name in self._names}, about, int(some[row]))

    def _locate(self, numbers: _Int64s) -> Iterator[dict[str, Any]]:
        """Yield where items without metadata of their own come from, as far as the source says it."""
        places = getattr(self._source, "places", None)
        if places is None:
            yield from ({} for _ in numbers)
            return
        found = {name: values.tolist() for name, values in places(numbers).items()}
        for values in zip(*found.values(), strict=True):
            yield {"file": self._file, **dict(zip(found, values, strict=True))}

    def _change(self, sample: dict[str, Any], about: dict[str, Any], number: int) -> Sample:
        """Return what the transform makes of an item, which keeps its metadata unless it gets others."""
        item = sample[UNNAMED] if self._names == [UNNAMED] else sample
        assert self._transform is not None, "asked by the caller"
        try:
            found = self._transform(item, generator_for(self._seed, "augment", 0, number))
        except (Exception, SystemExit) as error:
            named = f" ({about['sample_id']!r})" if "sample_id" in about else ""
            raise SourceError(
                f"{self._transform!r} failed at item {number}{named}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, Mapping):
            raise SourceError(f"{self._transform!r} must return a dict of fields, got {found!r:.60} for item {number}.")
        changed = dict(found)
        given = changed.pop(METADATA, None)
        if isinstance(given, Mapping) and given is not sample.get(METADATA):
            own = {name: value for name, value in given.items() if name not in RESERVED_KEYS}
            about = {**({"sample_id": about["sample_id"]} if "sample_id" in about else {}), **own}
        return changed, about

    def close(self) -> None:
        """Close the source; the next read opens it again."""
        self._source.close()


def _items_at_once(source: Source) -> tuple[int, int]:
    """Return how many items are read in one call, and how many the source is told of before."""
    stored_bytes = getattr(source, "stored_bytes", None) or 0
    sizes = [field.item_bytes or field.typical_bytes for field in source.fields.values()]
    item_bytes = max(1, stored_bytes // max(1, len(source.index)))
    read_bytes = item_bytes if None in sizes else max(1, sum(size or 0 for size in sizes))
    least = 1 if hasattr(source, "places") else _READ_ITEMS  # rows are copied once more, best within a cache
    at_once = max(1, min(least, _READ_BYTES // read_bytes), min(_SMALL_BYTES // read_bytes, _MOST_TOLD))
    if getattr(source, "reads_whole_chunks", False) is True:  # or each call would decode its chunks again
        at_once = max(at_once, min(source.index.usual_chunk, _CHUNK_BYTES // read_bytes))
    return at_once, min(max(at_once, _TOLD_BYTES // item_bytes), _MOST_TOLD)


def _read_blocks(
    source: Source, numbers: _Int64s, at_once: int, told: int, read: Callable[[_Int64s], Any] | None = None
) -> Iterator[tuple[_Int64s, Any]]:
    """Yield items, some at once, each with what was read; the source is told which items come next."""
    ahead = ItemsAhead(source, np.asarray(numbers, np.int64), told)
    for start in range(0, len(numbers), at_once):
        ahead.follow(start)
        some = numbers[start : start + at_once]
        if read is not None:
            yield some, read(some)
            continue
        first, last = int(some[0]), int(some[-1])
        is_span = 0 <= first == last - len(some) + 1 and bool((some[1:] > some[:-1]).all())
        yield some, source.read(Span(first, last + 1)) if is_span else source.take(some)


def _select(values: Any, row: int) -> Any:
    return values[row] if getattr(values, "dtype", _OBJECT) == _OBJECT else values[row, ...]


def _keep_item(item: Any, _: np.random.Generator, /) -> Any:
    return item


def _own_metadata(about: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the metadata of item `number` without an automatic id, and without its place in the shard."""
    found = {name: value for name, value in about.items() if name not in RESERVED_KEYS}
    sample_id = about.get("sample_id")
    return found if sample_id in (None, automatic_key(number)) else {"sample_id": sample_id, **found}
