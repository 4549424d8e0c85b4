"""Shards as an input whose fields are dropped, renamed or computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.convert.edit.derive import DerivedField, find_function
from penstock.convert.inputs.protocol import Sample, remote_of
from penstock.convert.inputs.shards import OpenShards
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.manifest import METADATA
from penstock.shard.names import KEY, automatic_key, encode_key
from penstock.source.tar.source import TarSource
from penstock.transform.read_values import ItemsAhead

__all__ = ["EditedShards"]

_READ_ITEMS = 32


@dataclass(frozen=True, slots=True)
class EditedShards:
    """A folder or URL of shards, with some of their fields under other names. Every byte is verified as it is read.

    Parameters
    ----------
    fields
        Old and new names of the fields that are read. None of them: the items are those of a sidecar, which have only
        the fields that are added, and the ids.
    has_metadata
        Whether items have metadata, which are always kept.
    added
        Names of further fields, and `module:function` that computes each from the item as it is stored.
    code
        A hash of each of these functions: with another one, the shards of an earlier attempt are not kept.
    """

    path: Path | Url
    fields: tuple[tuple[str, str], ...]
    has_metadata: bool = True
    added: tuple[tuple[str, str], ...] = ()
    code: tuple[str, ...] = ()
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    is_folder: ClassVar[bool] = True

    def open(self) -> "_EditedRecording | _Sidecar":
        """Open the shards."""
        return _EditedRecording(self) if self.fields else _Sidecar(self)


class _EditedRecording(OpenShards):
    def __init__(self, given: EditedShards) -> None:
        names = [name for name, _ in given.fields]
        super().__init__(given.path, given.remote, [*names, *([METADATA] if given.has_metadata else [])])
        self._renamed = dict(given.fields)
        self._derived = _Derived(given) if given.added else None
        self.about = {**self.about, **_list_origin(self.manifest.fingerprint, self.manifest.metadata)}

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`."""
        stored = super().samples(numbers)
        if self._derived is None:
            for sample, metadata in stored:
                yield {new: sample[old] for old, new in self._renamed.items()}, metadata
            return
        for (sample, metadata), (added, _) in zip(stored, self._derived.compute(numbers), strict=True):
            yield {**{new: sample[old] for old, new in self._renamed.items()}, **added}, metadata

    def close(self) -> None:
        """Close the shards."""
        super().close()
        if self._derived is not None:
            self._derived.close()


class _Sidecar(OpenShards):
    """The fields that are added, and the ids of the items, which are the keys of the shards if there is no other."""

    def __init__(self, given: EditedShards) -> None:
        super().__init__(given.path, given.remote)
        self._has_metadata, self._derived = given.has_metadata, _Derived(given)
        self.about = {**self.about, **_list_origin(self.manifest.fingerprint, self.manifest.metadata)}

    @property
    def ids(self) -> Sequence[str | None]:
        """The id of each item; None if it is automatic."""
        if self._has_metadata:
            return super().ids
        source = self._open(fields=[KEY])
        keys = source.take(np.arange(self.n_samples))[KEY].tolist()
        source.close()
        return [_own_key(key, number) for number, key in enumerate(keys)]

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`."""
        stored = self.metadata(numbers)
        for number, about, (added, key) in zip(numbers.tolist(), stored, self._derived.compute(numbers), strict=True):
            own = about.get("sample_id") if self._has_metadata else _own_key(key, number)
            yield added, {} if own is None else {"sample_id": own}

    def close(self) -> None:
        """Close the shards."""
        super().close()
        self._derived.close()


class _Derived:
    """Computes the added fields of items."""

    def __init__(self, given: EditedShards) -> None:
        self._fields = [DerivedField(name, named, find_function(named)) for name, named in given.added]
        store = remote_of(given).store if isinstance(given.path, Url) else None
        names = list(TarSource(str(given.path), store=store).fields)
        self._source = TarSource(str(given.path), fields=list(dict.fromkeys([*names, KEY])), store=store)

    def compute(self, numbers: NDArray[np.int64]) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the added fields and the key of each item."""
        ahead = ItemsAhead(self._source, np.asarray(numbers, np.int64), _READ_ITEMS)
        for start in range(0, len(numbers), _READ_ITEMS):
            ahead.follow(start)
            some = numbers[start : start + _READ_ITEMS]
            block = self._source.take(some)
            for row, number in enumerate(some.tolist()):
                sample = {name: values[row] for name, values in block.items()}
                key = str(sample[KEY])
                yield {each.name: each.compute(sample, number, key) for each in self._fields}, key

    def close(self) -> None:
        self._source.close()


def _own_key(key: str, number: int) -> str | None:
    """Return a key as the id of an item; None if it is automatic, or would be another key."""
    return None if key == automatic_key(number) or encode_key(key) != key else key


def _list_origin(fingerprint: str, metadata: Any) -> dict[str, Any]:
    """Return where a dataset came from, for the manifest of the one that is made of it."""
    conversion = metadata.get("conversion")
    return {"fingerprint": fingerprint, **({} if conversion is None else {"conversion": conversion})}
