"""Turning samples into members of a shard, with the same fields and dtypes in all of them."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.core.errors import OptionError
from penstock.shard.codec import ArrayFormat, Payload, encode, json_bytes
from penstock.shard.columns.packed_shard import PackedShard
from penstock.shard.manifest import METADATA, FieldInfo
from penstock.shard.names import automatic_key, check_fields, check_name_length, member_suffix
from penstock.shard.shard_file import ShardFile
from penstock.shard.tar import END, TAR_BLOCK, padded_size

__all__ = ["RESERVED_KEYS", "Members", "SampleForm"]

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
        self.suffixes = {name: info.suffix for name, info in known.items()}
        """Of the fields, by name; empty before the first sample."""
        self._dtypes: dict[str, np.dtype[Any] | None] = {name: info.dtype for name, info in known.items()}

    def encode(
        self, sample: Mapping[str, Any], number: int, key: str, sample_id: str, metadata: Mapping[str, Any] | None
    ) -> "Members":
        """Return the members of sample `number`; raise OptionError if its fields differ from those of earlier ones."""
        if not isinstance(sample, Mapping) or not sample:
            got = "an empty one" if isinstance(sample, Mapping) else type(sample).__name__
            raise OptionError(f"Sample {number} must be a dict with at least one field, got {got}.")
        payloads = self._encode_fields(sample, number)
        suffixes = self.suffixes or {name: member_suffix(name, one.extension) for name, one in payloads.items()}
        check_name_length(key, (*suffixes.values(), _METADATA))
        return Members(key, sample_id, suffixes, payloads, _encode_metadata(metadata))

    def add(self, members: "Members", shard: ShardFile | PackedShard, shard_number: int) -> None:
        """Add a sample to a shard. The first one determines the fields and dtypes of all that follow."""
        if isinstance(shard, PackedShard):
            shard.add(*members.row_in(shard.next_number))
        else:
            shard.add(*members.place_in(shard_number, shard.n_items))
        self._learn(members)

    def add_rows(self, members: "Members", shard: PackedShard, arrays: Mapping[str, Any]) -> None:
        """Add the rows of arrays, the first of which is `members`, as samples without ids and metadata."""
        shard.add_rows({suffix: arrays[name] for name, suffix in members.suffixes.items()})
        self._learn(members)

    def _learn(self, members: "Members") -> None:
        if not self.suffixes:
            self.suffixes = dict(members.suffixes)
            self._dtypes = {name: payload.dtype for name, payload in members.payloads.items()}

    def _encode_fields(self, sample: Mapping[str, Any], number: int) -> dict[str, Payload]:
        if not self.suffixes:
            check_fields(sample, METADATA)
            return {name: encode(name, value, self._array_format) for name, value in sample.items()}
        if sample.keys() != self.suffixes.keys():
            lacks, adds = sorted(self.suffixes.keys() - sample.keys()), sorted(sample.keys() - self.suffixes.keys())
            raise OptionError(
                f"All samples of a dataset must have the same fields, but sample {number} lacks {lacks} and adds "
                f"{adds}. Fill in missing fields (an empty array, ''), or write two datasets."
            )
        payloads = {}
        for name, suffix in self.suffixes.items():
            payload = payloads[name] = encode(name, sample[name], self._array_format)
            dtype, same_kind = self._dtypes[name], suffix.lower().endswith(payload.extension)
            if (payload.dtype is not dtype and payload.dtype != dtype) or not same_kind:
                raise OptionError(
                    f"Field {name!r} must be {dtype or suffix} as in earlier samples, got "
                    f"{payload.dtype or payload.extension} in sample {number}. Convert it."
                )
        return payloads


class Members(NamedTuple):
    """The members of one sample, encoded; the last one, its metadata, still lacks the place in the shard."""

    key: str
    sample_id: str
    suffixes: Mapping[str, str]
    payloads: Mapping[str, Payload]
    after: bytes
    """The metadata as JSON, what follows the place in the shard."""

    @property
    def before(self) -> bytes:
        """The metadata as JSON, up to the place in the shard."""
        names = _encode_names(tuple(self.suffixes))
        return b'{"sample_id":%b,"modalities":%b,' % (_ENCODE_JSON(self.sample_id).encode(), names)

    def place_in(self, shard_number: int, row: int) -> tuple[str, tuple[str, ...], list[Payload]]:
        """Return the key, suffixes and payloads of all members of an item that is number `row` of a shard."""
        place = b'"shard_idx":%d,"sample_idx_in_shard":%d' % (shard_number, row)
        metadata = self.before + place + self.after
        payloads = [*self.payloads.values(), Payload("json", (metadata,), len(metadata))]
        return self.key, (*self.suffixes.values(), _METADATA), payloads

    def row_in(self, number: int) -> tuple[str | None, tuple[str, ...], list[Payload], bytes]:
        """Return the id, unless it is automatic, suffixes, payloads and metadata of item `number` of a dataset."""
        sample_id = None if self.sample_id == automatic_key(number) else self.sample_id
        metadata = b"{" + self.after[1:] if len(self.after) > 1 else b"{}"
        return sample_id, tuple(self.suffixes.values()), list(self.payloads.values()), metadata

    def content_hash(self) -> int:
        """Return a hash of the fields and of the user's metadata, without key, id and place."""
        digest = xxhash.xxh3_64(self.after)
        for payload in self.payloads.values():
            for content in payload.buffers:
                digest.update(content)
        return digest.intdigest()

    @property
    def n_bytes(self) -> int:
        """Bytes of all payloads but the metadata."""
        return sum(payload.size for payload in self.payloads.values())

    def size_in(self, shard: ShardFile | PackedShard) -> int:
        """Return the size that an archive has with this sample, at most."""
        if isinstance(shard, PackedShard):
            sample_id, _, payloads, metadata = self.row_in(shard.next_number)
            return shard.tar_bytes + shard.most_bytes(sample_id, payloads, metadata) + len(END)
        fields = sum(TAR_BLOCK + padded_size(payload.size) for payload in self.payloads.values())
        # The place in the shard takes less than a block.
        metadata_bytes = 2 * TAR_BLOCK + padded_size(len(self.before) + len(self.after))
        return shard.tar_bytes + fields + metadata_bytes + len(END)


def _encode_metadata(metadata: Mapping[str, Any] | None) -> bytes:
    """Encode the metadata of a sample as JSON; return the bytes after its place in the shard."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise OptionError(f"metadata must be a dict such as {{'trial_id': 7}}, got {metadata!r}.")
    reserved = [name for name in RESERVED_KEYS if name in metadata] if metadata else []
    if reserved:
        raise OptionError(
            f"metadata must not have the names {', '.join(RESERVED_KEYS)}, which the writer sets, got "
            f"{', '.join(reserved)}. Rename them; the id of a sample is given as sample_id."
        )
    if not metadata:
        return b"}"
    return b"," + json_bytes(metadata, "metadata")[1:]


@lru_cache(maxsize=16)
def _encode_names(modalities: tuple[str, ...]) -> bytes:
    return json_bytes(list(modalities), "fields")
