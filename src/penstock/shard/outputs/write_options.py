"""The options of a write, and the shards that it opens by them."""

import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.shard.codec import ArrayFormat, json_bytes
from penstock.shard.columns.packed_shard import PackedShard
from penstock.shard.compression import COMPRESSIONS, Compression, max_decompressed_bytes
from penstock.shard.outputs.place import ShardFolder
from penstock.shard.shard_file import ShardFile

__all__ = ["SMALL_ITEM", "Layout", "Shard", "WriteOptions", "open_shard"]

Layout = Literal["samples", "columns", "auto"]
Shard = ShardFile | PackedShard
"""A shard being written, in either layout."""

SMALL_ITEM = 1 << 16
"""Bytes of an item below which `layout="auto"` takes columns: headers and padding of a sample are then over 3 %,
as measured in docs/how-to/write-shards.md."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options that, with the samples, determine every byte of a dataset."""

    shard_size: int = 1000
    shard_name_pattern: str = "shard_{shard_idx:06d}.tar"
    compression: Compression = "none"
    array_format: ArrayFormat = "npy"
    max_shard_bytes: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = "samples"

    def __post_init__(self) -> None:
        check_integer("shard_size", self.shard_size, at_least=1)
        if self.max_shard_bytes is not None:
            check_integer("max_shard_bytes", self.max_shard_bytes, at_least=4096)
        if self.compression not in COMPRESSIONS:
            raise OptionError(
                f"compression must be one of {', '.join(map(repr, COMPRESSIONS))}, got {self.compression!r}."
            )
        if self.array_format not in get_args(ArrayFormat):
            raise OptionError(f"array_format must be 'npy', or 'pyd' for pickles, got {self.array_format!r}.")
        if self.layout not in get_args(Layout):
            raise OptionError(f"layout must be 'samples', 'columns' or 'auto', got {self.layout!r}.")
        if self.layout == "columns" and self.array_format != "npy":
            raise OptionError(
                f"layout='columns' stores arrays as .npy, got array_format={self.array_format!r}. Use "
                "layout='samples', or array_format='npy'."
            )
        json_bytes(dict(self.metadata), "metadata")
        _check_pattern(self.shard_name_pattern)

    @property
    def most_tar_bytes(self) -> int | None:
        """The largest archive, in bytes. Compressed ones always have a bound, since they are decompressed whole."""
        if self.compression == "none":
            return self.max_shard_bytes
        return min(self.max_shard_bytes or max_decompressed_bytes(0), max_decompressed_bytes(0))

    def shard_name(self, number: int) -> str:
        """Return the file name of a shard."""
        return self.shard_name_pattern.format(shard_idx=number)

    def packs(self, item_bytes: int) -> bool:
        """Return whether a shard whose first item has this size is in the layout "columns"."""
        is_small = self.layout == "auto" and self.array_format == "npy" and item_bytes < SMALL_ITEM
        return self.layout == "columns" or is_small

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain values; without the layout if it is the usual one, which had no name once."""
        plain = asdict(self)
        if self.layout == "samples":
            del plain["layout"]
        return plain


def open_shard(folder: ShardFolder, options: WriteOptions, number: int, first: int, item_bytes: int) -> Shard:
    """Return shard `number` to write to, whose first item is number `first` of the dataset and has `item_bytes`."""
    sink = folder.open_sink(options.shard_name(number))
    if options.packs(item_bytes):
        return PackedShard(sink, options.compression, first)
    return ShardFile(sink, options.compression)


def _check_pattern(pattern: str) -> None:
    try:
        names = {pattern.format(shard_idx=number) for number in (0, 1, 999_999, 1_000_000)}
        fields = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except (IndexError, KeyError, ValueError) as error:
        raise OptionError(
            f"shard_name_pattern must be a format string with {{shard_idx}}, got {pattern!r}: {error}."
        ) from error
    if fields != {"shard_idx"} or len(names) < 4:
        raise OptionError(
            "shard_name_pattern must give every shard its own name, such as 'train_{shard_idx:06d}.tar', "
            f"got {pattern!r}."
        )
    if any(
        "/" in name or name.startswith(".") or not name.endswith(".tar") or not name.isprintable() for name in names
    ):
        raise OptionError(f"shard_name_pattern must be a plain file name that ends in .tar, got {pattern!r}.")
