"""What to read of a dataset, and how items get from the bytes of a request into arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency
from penstock.core.types import Field
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.shard.decoders.decode import Decoding, decode
from penstock.shard.manifest import FieldInfo, Manifest
from penstock.shard.names import KEY
from penstock.source.tar.request import Request

__all__ = ["ReadSpec", "Verify", "fill_block"]

_Int64s = NDArray[np.int64]

Verify = Literal["first", "always", "never"]


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What to read of a dataset, and how."""

    manifest: Manifest
    infos: Mapping[str, FieldInfo]
    fields: Mapping[str, Field]
    borders: _Int64s
    """First item of each shard, then the number of items."""

    verify: Verify
    decode: Decoding
    allow_pickle: bool
    archives: RemoteFolder | None = None
    """Where the shards are; None: in a folder of this machine."""

    def reads_like(self, other: "ReadSpec") -> bool:
        """Return whether items of both are read into the same arrays, in the same way."""
        ways = [(dict(s.infos), dict(s.fields), s.verify, s.decode, s.allow_pickle, s.archives) for s in (self, other)]
        return ways[0] == ways[1]

    @property
    def suffixes(self) -> set[str]:
        """The suffixes of the members that hold the fields."""
        return {info.suffix for info in self.infos.values()}

    @property
    def fixed(self) -> dict[str, tuple[str, Field]]:
        """Suffix and field of each field of fixed size, by name."""
        sized = ((name, field) for name, field in self.fields.items() if field.item_bytes is not None)
        return {name: (self.infos[name].suffix, field) for name, field in sized}


def fill_block(request: Request, block: Mapping[str, NDArray[Any]], spec: ReadSpec) -> None:
    """Read the fixed fields extent by extent, then the others field by field."""
    done: set[str] = set()
    for extent, begins, checksums_at in request.locate_extents():
        request.copy_extent(extent, begins, checksums_at, [_byte_rows(block[name]) for name in extent.names])
        done.update(extent.names)
    if KEY in block:
        request.fill_keys(block[KEY])
        done.add(KEY)
    for name, field in spec.fields.items():
        if name in done:
            continue
        suffix, column, places = spec.infos[name].suffix, block[name], request.places.tolist()
        for number, payload in request.payloads(suffix):
            value = None if payload is None else _decode(request, number, suffix, payload, spec)
            if field.item_bytes is not None:
                _check_value(request, number, name, field, value)
            column[places[number]] = value


def _decode(request: Request, number: int, suffix: str, payload: memoryview, spec: ReadSpec) -> Any:
    try:
        return decode(suffix, payload, decoding=spec.decode, allow_pickle=spec.allow_pickle)
    except MissingDependency:
        raise
    except ValueError as error:
        raise request.damage(number, f"{suffix!r}: {error}") from error


def _byte_rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a view of a contiguous array: the bytes of each item as a row."""
    width = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(np.uint8) if width else np.empty((len(array), 0), np.uint8)


def _check_value(request: Request, number: int, name: str, field: Field, value: Any) -> None:
    found = (getattr(value, "dtype", None), getattr(value, "shape", None))
    if found != (field.dtype, field.shape):
        reason = f"field {name!r} is {found[0]} {found[1]}, but the manifest says {field.dtype} {field.shape}"
        raise request.damage(number, reason)
