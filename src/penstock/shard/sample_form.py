"""Samples become members of a shard: the same fields, of the same dtypes, in all of them."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.errors import OptionError
from penstock.shard.codec import ArrayFormat, Payload, encode, json_bytes
from penstock.shard.manifest import METADATA, FieldInfo
from penstock.shard.names import check_fields, check_name_length
from penstock.shard.shard_file import ShardFile

__all__ = ["SampleForm"]

_OWN_KEYS = ("sample_id", "modalities", "shard_idx", "sample_idx_in_shard")
_METADATA = f"{METADATA}.json"
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


class SampleForm:
    """What all samples of a data set have in common; learned from the first one.

    Parameters
    ----------
    array_format
        How arrays are stored.
    fields
        What is known already, from shards that are there.
    """

    def __init__(self, array_format: ArrayFormat, fields: Mapping[str, FieldInfo] | None = None) -> None:
        self._array_format: ArrayFormat = array_format
        known = {name: info for name, info in (fields or {}).items() if name != METADATA}
        self._suffixes = {name: info.suffix for name, info in known.items()}
        self._dtypes: dict[str, np.dtype[Any] | None] = {name: info.dtype for name, info in known.items()}

    def encode(self, sample: Mapping[str, Any], number: int) -> dict[str, Payload]:
        """Return the fields of sample `number` as they are stored; raise where it is not like those before it."""
        if not isinstance(sample, Mapping) or not sample:
            kind = "empty" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
            raise OptionError(f"Sample {number} is {kind}; give a dict of at least one field.")
        if not self._suffixes:
            check_fields(sample, METADATA)
            return {name: encode(name, value, self._array_format) for name, value in sample.items()}
        if sample.keys() != self._suffixes.keys():
            lacks, has = sorted(self._suffixes.keys() - sample.keys()), sorted(sample.keys() - self._suffixes.keys())
            raise OptionError(
                f"Sample {number} lacks {lacks} and has {has}, unlike the samples before it; all samples of a "
                "data set have the same fields. Fill in what is missing (an empty array, ''), or write two sets."
            )
        payloads = {}
        for name, suffix in self._suffixes.items():
            payload = payloads[name] = encode(name, sample[name], self._array_format)
            dtype = self._dtypes[name]
            if (payload.dtype is not dtype and payload.dtype != dtype) or not suffix.endswith(payload.extension):
                raise OptionError(
                    f"Field {name!r} of sample {number} is {payload.dtype or payload.extension}, but "
                    f"{dtype or suffix} in those before it; convert it."
                )
        return payloads

    def make_members(
        self, key: str, sample_id: str, payloads: Mapping[str, Payload], metadata: Mapping[str, Any] | None
    ) -> "Members":
        """Return the members of one sample, ready to be added to a shard."""
        suffixes = self._suffixes or {name: f"{name}.{payload.extension}" for name, payload in payloads.items()}
        names = (*suffixes.values(), _METADATA)
        check_name_length(key, names)
        before, after = _metadata(sample_id, tuple(suffixes), metadata)
        return Members(key, names, tuple(payloads.values()), before, after)

    def learn(self, payloads: Mapping[str, Payload]) -> None:
        """Take a sample that was added as the measure of those that follow."""
        if not self._suffixes:
            self._suffixes = {name: f"{name}.{payload.extension}" for name, payload in payloads.items()}
            self._dtypes = {name: payload.dtype for name, payload in payloads.items()}


class Members:
    """The members of one sample; the last one is what is known of it, with its place in the shard."""

    __slots__ = ("_after", "_before", "_key", "_payloads", "_suffixes")

    def __init__(
        self, key: str, suffixes: tuple[str, ...], payloads: tuple[Payload, ...], before: bytes, after: bytes
    ) -> None:
        self._key, self._suffixes, self._payloads, self._before, self._after = key, suffixes, payloads, before, after

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """All but the metadata."""
        return self._payloads

    @property
    def metadata_bytes(self) -> int:
        """Of the metadata, without the place in the shard."""
        return len(self._before) + len(self._after)

    def add_to(self, shard: ShardFile, shard_number: int) -> None:
        """Add the sample to a shard."""
        place = b'"shard_idx":%d,"sample_idx_in_shard":%d' % (shard_number, shard.n_items)
        about = self._before + place + self._after
        shard.add(self._key, self._suffixes, [*self._payloads, Payload("json", (about,), len(about))])


def _metadata(sample_id: str, modalities: tuple[str, ...], metadata: Mapping[str, Any] | None) -> tuple[bytes, bytes]:
    """Return what is known of a sample, as JSON: what comes before its place in the shard, and what comes after."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise OptionError(f"metadata={metadata!r} is no dict; give names and values, such as {{'trial_id': 7}}.")
    before = b'{"sample_id":%b,"modalities":%b,' % (_ENCODE(sample_id).encode(), _names(modalities))
    if not metadata:
        return before, b"}"
    given = {name: value for name, value in metadata.items() if name not in _OWN_KEYS}
    return before, b"," + json_bytes(given, "metadata")[1:] if given else b"}"


@lru_cache(maxsize=16)
def _names(modalities: tuple[str, ...]) -> bytes:
    return json_bytes(list(modalities), "fields")
