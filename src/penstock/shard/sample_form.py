"""Turning samples into members of a shard, with the same fields and dtypes in all of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.core.errors import OptionError
from penstock.shard.codec import ArrayFormat, Payload, encode, json_bytes
from penstock.shard.manifest import METADATA, FieldInfo
from penstock.shard.names import check_fields, check_name_length, member_suffix
from penstock.shard.shard_file import MemberLayouts, ShardFile
from penstock.shard.side_index import SideIndex, index_name
from penstock.shard.tar import TAR_BLOCK, padded_size

__all__ = ["RESERVED_KEYS", "Members", "SampleForm", "StoredSamples"]

RESERVED_KEYS = ("sample_id", "modalities", "shard_idx", "sample_idx_in_shard")
"""Names in the metadata of a sample that the writer sets."""

_METADATA = f"{METADATA}.json"
_ENCODE_JSON = json.JSONEncoder(ensure_ascii=False).encode


class SampleForm:
    """The fields and dtypes that all samples of a dataset share; learned from the first sample.

    Parameters
    ----------
    array_format
        How arrays are stored.
    fields
        Fields of existing shards, if any.
    """

    def __init__(self, array_format: ArrayFormat, fields: Mapping[str, FieldInfo] | None = None) -> None:
        self._array_format: ArrayFormat = array_format
        known = {name: info for name, info in (fields or {}).items() if name != METADATA}
        self._suffixes = {name: info.suffix for name, info in known.items()}
        self._dtypes: dict[str, np.dtype[Any] | None] = {name: info.dtype for name, info in known.items()}

    def encode(
        self, sample: Mapping[str, Any], number: int, key: str, sample_id: str, metadata: Mapping[str, Any] | None
    ) -> "Members":
        """Return the members of sample `number`; raise OptionError if its fields differ from those of earlier ones."""
        if not isinstance(sample, Mapping) or not sample:
            got = "an empty one" if isinstance(sample, Mapping) else type(sample).__name__
            raise OptionError(f"Sample {number} must be a dict with at least one field, got {got}.")
        payloads = self._encode_fields(sample, number)
        suffixes = self._suffixes or {name: member_suffix(name, one.extension) for name, one in payloads.items()}
        check_name_length(key, (*suffixes.values(), _METADATA))
        return Members(key, suffixes, payloads, *_encode_metadata(sample_id, tuple(suffixes), metadata))

    def add(self, members: "Members", shard: ShardFile, shard_number: int) -> None:
        """Add a sample to a shard. The first one determines the fields and dtypes of all that follow."""
        shard.add(*members.place_in(shard_number, shard.n_items))
        if not self._suffixes:
            self._suffixes = dict(members.suffixes)
            self._dtypes = {name: payload.dtype for name, payload in members.payloads.items()}

    def _encode_fields(self, sample: Mapping[str, Any], number: int) -> dict[str, Payload]:
        if not self._suffixes:
            check_fields(sample, METADATA)
            return {name: encode(name, value, self._array_format) for name, value in sample.items()}
        if sample.keys() != self._suffixes.keys():
            lacks, adds = sorted(self._suffixes.keys() - sample.keys()), sorted(sample.keys() - self._suffixes.keys())
            raise OptionError(
                f"All samples of a dataset must have the same fields, but sample {number} lacks {lacks} and adds "
                f"{adds}. Fill in missing fields (an empty array, ''), or write two datasets."
            )
        payloads = {}
        for name, suffix in self._suffixes.items():
            payload = payloads[name] = encode(name, sample[name], self._array_format)
            dtype, same_kind = self._dtypes[name], suffix.lower().endswith(payload.extension)
            if (payload.dtype is not dtype and payload.dtype != dtype) or not same_kind:
                raise OptionError(
                    f"Field {name!r} must be {dtype or suffix} as in earlier samples, got "
                    f"{payload.dtype or payload.extension} in sample {number}. Convert it."
                )
        return payloads


class StoredSamples:
    """The samples of finished shards, to compare others with.

    Parameters
    ----------
    read_index
        Returns the side index of a shard, given the name of the shard.
    shards
        Name and number of items of each.
    """

    def __init__(self, read_index: Callable[[str], bytes], shards: Sequence[tuple[str, int]]) -> None:
        self._read_index, self._names = read_index, [name for name, _ in shards]
        self._ends = np.cumsum([n_items for _, n_items in shards])
        self._layouts = MemberLayouts()
        self._open: tuple[int, SideIndex] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def first_shard_items(self) -> int:
        """Items of the first shard."""
        return int(self._ends[0])

    def has(self, number: int, members: "Members") -> bool:
        """Return whether sample `number` is stored with exactly these bytes."""
        shard = int(np.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[shard - 1]) if shard else 0)
        stored = {column.suffix: int(column.checksums[row]) for column in self._side_index(shard).columns}
        return self._layouts.checksums(*members.place_in(shard, row)) == stored

    def _side_index(self, shard: int) -> SideIndex:
        if self._open is None or self._open[0] != shard:
            name = self._names[shard]
            self._open = shard, SideIndex.from_bytes(self._read_index(name), index_name(name))
        return self._open[1]


class Members(NamedTuple):
    """The members of one sample, encoded; the last one, its metadata, still lacks the place in the shard."""

    key: str
    suffixes: Mapping[str, str]
    payloads: Mapping[str, Payload]
    before: bytes
    after: bytes

    def place_in(self, shard_number: int, row: int) -> tuple[str, tuple[str, ...], list[Payload]]:
        """Return the key, suffixes and payloads of all members of an item that is number `row` of a shard."""
        place = b'"shard_idx":%d,"sample_idx_in_shard":%d' % (shard_number, row)
        metadata = self.before + place + self.after
        payloads = [*self.payloads.values(), Payload("json", (metadata,), len(metadata))]
        return self.key, (*self.suffixes.values(), _METADATA), payloads

    def content_hash(self) -> int:
        """Return a hash of the fields and of the user's metadata, without key, id and place."""
        digest = xxhash.xxh3_64(self.after)
        for payload in self.payloads.values():
            for content in payload.buffers:
                digest.update(content)
        return digest.intdigest()

    @property
    def most_bytes(self) -> int:
        """The most that the sample takes in an archive, with headers and padding."""
        fields = sum(TAR_BLOCK + padded_size(payload.size) for payload in self.payloads.values())
        # The place in the shard takes less than a block.
        return fields + 2 * TAR_BLOCK + padded_size(len(self.before) + len(self.after))


def _encode_metadata(
    sample_id: str, modalities: tuple[str, ...], metadata: Mapping[str, Any] | None
) -> tuple[bytes, bytes]:
    """Encode the metadata of a sample as JSON; return the bytes before and after its place in the shard."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise OptionError(f"metadata must be a dict such as {{'trial_id': 7}}, got {metadata!r}.")
    reserved = [name for name in RESERVED_KEYS if name in metadata] if metadata else []
    if reserved:
        raise OptionError(
            f"metadata must not have the names {', '.join(RESERVED_KEYS)}, which the writer sets, got "
            f"{', '.join(reserved)}. Rename them; the id of a sample is given as sample_id."
        )
    before = b'{"sample_id":%b,"modalities":%b,' % (_ENCODE_JSON(sample_id).encode(), _encode_names(modalities))
    if not metadata:
        return before, b"}"
    return before, b"," + json_bytes(metadata, "metadata")[1:]


@lru_cache(maxsize=16)
def _encode_names(modalities: tuple[str, ...]) -> bytes:
    return json_bytes(list(modalities), "fields")
