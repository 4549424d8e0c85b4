"""The shards of a dataset as columns, and their binary form: the shard table beside a large manifest.

A manifest of 10⁵ shards is 23 MB of JSON, which takes a second and 120 MB to parse. Its shard table holds the same in
8 MB that are used as they are. The table is derived from the manifest and bound to its bytes by a checksum. The
manifest stays the truth: a table that is missing, damaged or of another manifest is ignored.
"""

import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.files.regular import open_regular, read_regular
from penstock.shard.columns.read_index import ShardIndex, parse_index
from penstock.shard.columns.row_index import BLOCK_ROWS
from penstock.shard.compression import COMPRESSIONS, Compression, max_decompressed_bytes
from penstock.shard.side_index import index_name
from penstock.shard.tar import TAR_BLOCK

__all__ = ["ShardEntry", "ShardTable", "read_table", "table_path"]

_Int64s = NDArray[np.int64]

_MAGIC = b"PENSTOCK-SHARDS\x01"
_CHECKSUM_BYTES = 16
_NUMBERS = 5  # columns of 64-bit integers: items, two sizes, the ends of two texts
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard, as listed in the manifest."""

    name: str
    n_items: int
    tar_bytes: int
    """Size of the decompressed archive."""

    stored_bytes: int
    """Size of the file."""

    digest: str
    """Digest of the side index."""

    compression: Compression = "none"

    def parse_index(self, stored: bytes, suffixes: Collection[str] | None = None) -> ShardIndex:
        """Parse the side index of the shard, or some of its columns; raise if the manifest lists another."""
        side_index = parse_index(stored, index_name(self.name), suffixes)
        has_listed_size = (side_index.n_items, side_index.tar_bytes) == (self.n_items, self.tar_bytes)
        if xxhash.xxh3_128_hexdigest(stored) != self.digest or not has_listed_size:
            raise DamageError(
                self.name,
                None,
                "its side index is not the one that the manifest lists: the shard was replaced, swapped with another "
                "one or rewritten after the manifest",
            )
        return side_index


class ShardTable(Sequence[ShardEntry]):
    """The shards of a dataset, in order; equal to the tuple of its entries.

    Attributes
    ----------
    n_items, tar_bytes, stored_bytes
        One number for each shard.
    """

    __slots__ = ("_codes", "_digests", "_names", "n_items", "stored_bytes", "tar_bytes")

    def __init__(self, numbers: _Int64s, codes: NDArray[np.uint8], names: "_Texts", digests: "_Texts") -> None:
        self.n_items, self.tar_bytes, self.stored_bytes = numbers
        self._codes, self._names, self._digests = codes, names, digests

    @classmethod
    def from_entries(cls, entries: Sequence[ShardEntry]) -> "ShardTable":
        """Return a table of these shards; raise ValueError if a name or digest is no valid text."""
        if isinstance(entries, ShardTable):
            return entries
        rows = [(entry.n_items, entry.tar_bytes, entry.stored_bytes) for entry in entries]
        return cls(
            np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 3).T),
            np.array([COMPRESSIONS.index(entry.compression) for entry in entries], np.uint8),
            _Texts.join(entry.name for entry in entries),
            _Texts.join(entry.digest for entry in entries),
        )

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(number, slice):
            return tuple(self[each] for each in range(*number.indices(len(self))))
        place = range(len(self))[number]
        return ShardEntry(
            self._names[place],
            int(self.n_items[place]),
            int(self.tar_bytes[place]),
            int(self.stored_bytes[place]),
            self._digests[place],
            COMPRESSIONS[self._codes[place]],
        )

    def __iter__(self) -> Iterator[ShardEntry]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShardTable):
            return self._columns() == other._columns()
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"ShardTable({len(self)} shards)"

    @property
    def digest(self) -> str:
        """Digest of the digests of all shards, in order."""
        return xxhash.xxh3_128_hexdigest(self._digests.join_with(b"\n"))

    @property
    def is_plain(self) -> NDArray[np.bool_]:
        """Whether each shard is not compressed."""
        return np.equal(self._codes, COMPRESSIONS.index("none"))

    @property
    def compressions(self) -> list[Compression]:
        """The compressions that occur."""
        return [COMPRESSIONS[code] for code in np.unique(self._codes)]

    def validate(self, layout: str = "samples") -> None:
        """Raise ValueError if no shard of this layout can have one of these names or sizes."""
        most = 1 if layout == "samples" else BLOCK_ROWS  # items in a member
        plain = self.is_plain
        wrong = (self.n_items < 1) | (self.tar_bytes < 0) | (self.stored_bytes < 0)
        wrong |= (-(-self.n_items // most) > self.tar_bytes // TAR_BLOCK) | (
            plain & (self.tar_bytes != self.stored_bytes)
        )
        for number in np.flatnonzero(~plain & (self.tar_bytes > max_decompressed_bytes(0))).tolist():
            wrong[number] |= int(self.tar_bytes[number]) > max_decompressed_bytes(int(self.stored_bytes[number]))
        for number in np.flatnonzero(wrong).tolist():
            entry = self[number]
            raise ValueError(
                f"{entry.name} cannot hold {entry.n_items} items in {entry.stored_bytes} bytes, which decompress to "
                f"{entry.tar_bytes}"
            )
        self._names.validate_file_names()

    def to_bytes(self, head: bytes, manifest: bytes) -> bytes:
        """Return the stored form, with the manifest's other keys in `head`, for the manifest of these bytes."""
        head += b" " * (-len(head) % 8)
        lengths = np.array([len(self), len(head), len(self._names.joined), len(self._digests.joined)], "<u8").tobytes()
        stored = b"".join([_MAGIC, lengths, xxhash.xxh3_128_digest(manifest), head, *self._columns()])
        return stored + xxhash.xxh3_128_digest(stored)

    @classmethod
    def from_bytes(cls, stored: bytes, manifest_digest: bytes) -> "tuple[ShardTable, bytes]":
        """Return the table and the head; raise ValueError if they are not those of the manifest with this digest."""
        at = len(_MAGIC) + 4 * 8
        if stored[: len(_MAGIC)] != _MAGIC or stored[at : at + _CHECKSUM_BYTES] != manifest_digest:
            raise ValueError("not the table of this manifest")
        n_shards, *lengths = (int(n) for n in np.frombuffer(stored, "<u8", 4, len(_MAGIC)))
        sizes = [lengths[0], _NUMBERS * 8 * n_shards, n_shards, lengths[1], lengths[2]]
        ends = list(itertools.accumulate(sizes, initial=at + _CHECKSUM_BYTES))
        content = memoryview(stored)
        if ends[-1] != len(stored) - _CHECKSUM_BYTES or not n_shards or lengths[0] % 8:
            raise ValueError("its length does not match its header")
        if xxhash.xxh3_128_digest(content[: ends[-1]]) != content[ends[-1] :]:
            raise ValueError("it does not match its own checksum")
        head, numbers, codes, names, digests = (content[start:stop] for start, stop in itertools.pairwise(ends))
        columns = np.frombuffer(numbers, "<i8").astype(np.int64).reshape(_NUMBERS, n_shards)  # copies, like the texts
        table = cls(
            columns[:3],
            np.frombuffer(codes, np.uint8).copy(),
            _Texts.parse(bytes(names), columns[3]),
            _Texts.parse(bytes(digests), columns[4]),
        )
        if table._codes.max() >= len(COMPRESSIONS):
            raise ValueError("unknown compression")
        about = json.loads(bytes(head))
        table.validate(about.get("layout", "samples") if isinstance(about, dict) else "samples")
        return table, bytes(head)

    def _columns(self) -> list[bytes]:
        numbers = (self.n_items, self.tar_bytes, self.stored_bytes, self._names.ends, self._digests.ends)
        arrays = [column.astype("<i8").tobytes() for column in numbers]
        return [*arrays, self._codes.tobytes(), self._names.joined, self._digests.joined]


class _Texts:
    """One text for each shard: all in UTF-8, joined, and where each ends."""

    __slots__ = ("ends", "joined")

    def __init__(self, joined: bytes, ends: _Int64s) -> None:
        self.joined, self.ends = joined, ends

    @classmethod
    def join(cls, texts: Iterable[str]) -> "_Texts":
        encoded = [text.encode() for text in texts]
        return cls(b"".join(encoded), np.cumsum([len(text) for text in encoded], dtype=np.int64))

    @classmethod
    def parse(cls, joined: bytes, ends: _Int64s) -> "_Texts":
        """Check texts from a file; raise ValueError if they are none."""
        joined.decode()
        if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] != len(joined):
            raise ValueError("its texts do not end where it says")
        begins = ends[:-1][ends[:-1] < len(joined)]
        if (np.frombuffer(joined, np.uint8)[begins] & 0xC0 == 0x80).any():  # the middle of a character
            raise ValueError("its texts are not UTF-8")
        return cls(joined, ends)

    def __getitem__(self, number: int) -> str:
        return self.joined[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])].decode()

    def join_with(self, separator: bytes) -> bytes:
        """Return all texts, with a separator of one byte between them."""
        spread = np.full(len(self.joined) + len(self.ends), ord(separator), np.uint8)
        is_text = np.ones(len(spread), bool)
        is_text[self.ends + np.arange(len(self.ends))] = False
        spread[is_text] = np.frombuffer(self.joined, np.uint8)
        return spread[:-1].tobytes()

    def validate_file_names(self) -> None:
        """Raise ValueError if a text is no name of a file in the same folder."""
        lengths = np.diff(self.ends, prepend=0)
        short = [self[number] for number in np.flatnonzero(lengths < 3).tolist()]
        if b"/" in self.joined or b"\0" in self.joined or not {"", ".", ".."}.isdisjoint(short):
            raise ValueError("a shard name points outside the folder")


def table_path(manifest: Path) -> Path:
    """Return the path of the shard table of a manifest."""
    return manifest.with_suffix(".shards")


def read_table(manifest: Path) -> tuple[ShardTable, bytes] | None:
    """Return the shard table of a manifest, and the manifest's other keys as JSON; None if there is no valid table."""
    try:
        with open_regular(manifest) as file:
            stored = read_regular(table_path(manifest), max_bytes=os.fstat(file.fileno()).st_size)
            digest = xxhash.xxh3_128()
            while content := file.read(_HASHED_BYTES):
                digest.update(content)
        return ShardTable.from_bytes(stored, digest.digest())
    except (OSError, ValueError, RecursionError):
        return None
