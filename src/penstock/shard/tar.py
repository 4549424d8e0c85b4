"""Tar archives, block by block: the headers that we write, and the strict reading of what others wrote.

CPython's `tarfile` takes a bad header for the end of the archive and says nothing. Here, everything that is not a
regular member, a directory or the proper end is an error that says where it is.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from penstock.core.errors import DamageError, OptionError

__all__ = [
    "TAR_BLOCK",
    "END",
    "MAX_NAME",
    "HeaderTemplate",
    "Member",
    "Readable",
    "header",
    "byte_sum",
    "read_members",
    "padded_size",
]

TAR_BLOCK = 512
END = bytes(2 * TAR_BLOCK)
"""What an archive ends with."""

MAX_NAME = 100
"""The bytes of a name that a header holds."""

_MAX_SIZE = 8**11 - 1  # eleven octal digits
_MAX_EXTENSION = 1 << 20  # a long name or a PAX header; anything larger is an attack or an accident
_MOST_EXTENSIONS = 8  # extension headers before one member
_HEAD_BYTES = 1 << 16  # of each payload, kept for who wants to look at it: the header of a .npy fits
_PIECE_BYTES = 1 << 20

_MODE_TO_GID = b"\x00".join((b"0000644", b"0000000", b"0000000", b""))
_MTIME = b"00000000000\x00"  # always 0: the same samples give the same bytes
_TAIL = (b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\x00" * 2).ljust(TAR_BLOCK - 156, b"\x00")

_REGULAR = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


def padded_size(size: int) -> int:
    """Return `size` rounded up to whole blocks."""
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def header(name: str, size: int) -> bytes:
    """Return the header of a regular member."""
    key, dot, suffix = name.partition(".")
    return HeaderTemplate(dot + suffix, size).header(key.encode(), byte_sum(key.encode()))


def byte_sum(key: bytes) -> int:
    """Return the sum of the bytes of a key, which is part of the checksum of each of its headers."""
    # Adler-32 counts 1 + the sum of the bytes in its lower half, and a name's sum stays below its modulus.
    return (zlib.adler32(key) & 0xFFFF) - 1


class HeaderTemplate:
    """The header of members that differ in their keys only: a writer makes millions of them."""

    __slots__ = ("_key_bytes", "_middle", "_rest", "_suffix", "_to_checksum", "padding", "size")

    def __init__(self, suffix: str, size: int) -> None:
        if size > _MAX_SIZE:
            raise OptionError(
                f"A member {suffix!r} has {size} bytes; a tar holds {_MAX_SIZE}. Cut it into several items."
            )
        self.size = size
        self.padding = bytes(-size % TAR_BLOCK)
        self._suffix = suffix.encode()
        self._middle = b"%b%011o\x00%b" % (_MODE_TO_GID, size, _MTIME)
        # The checksum field counts as eight blanks.
        self._rest = sum(self._suffix) + sum(self._middle) + 8 * ord(" ") + sum(_TAIL)
        self._key_bytes, self._to_checksum = -1, b""

    def header(self, key: bytes, key_letters: int) -> bytes:
        """Return the header of the member of `key`, whose `letters` are given."""
        if len(key) != self._key_bytes:
            self._fit(key)
        return b"%b%b%06o\x00 %b" % (key, self._to_checksum, self._rest + key_letters, _TAIL)

    def _fit(self, key: bytes) -> None:
        """Prepare what lies between the key and the checksum, which keys of one length have in common."""
        room = MAX_NAME - len(key)
        if len(self._suffix) > room:
            name = (key + self._suffix).decode()
            raise OptionError(
                f"The member name {name!r} has {len(key + self._suffix)} bytes; a tar header holds {MAX_NAME}. "
                "Use a shorter sample id or field name."
            )
        self._key_bytes, self._to_checksum = len(key), self._suffix.ljust(room, b"\x00") + self._middle


class Readable(Protocol):
    """What `read_members` reads from: a file, or a stream of decompressed bytes."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; fewer only at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file in an archive."""

    name: str
    begin: int
    """Where its first header begins."""

    offset: int
    """Where its payload begins."""

    size: int
    check: int
    """XXH3 of everything from `begin` to the end of the padding."""

    head: bytes
    """The beginning of the payload."""


def read_members(stream: Readable, shard: str) -> Iterator[Member]:
    """Yield the regular members of an archive, reading all of it; raise DamageError at anything improper.

    1. The archive ends without its two blocks of zeros, or in the middle of something: it is truncated.
    2. A header whose checksum is wrong, a size that is no number, bytes after the end: it is damaged.
    3. A link, device or pipe, an absolute name or one with `..`: it is refused, since no data set needs one.
    """
    reader = _Reader(stream, shard)
    while True:
        begin, digest = reader.position, xxhash.xxh3_64()
        name, size, block = "", -1, b""
        for _ in range(_MOST_EXTENSIONS + 1):
            block = reader.block(digest)
            if block == END[:TAR_BLOCK]:
                break
            kind, plain_name, plain_size = _parsed(block, shard, reader.position - TAR_BLOCK)
            if kind not in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
                break
            long_name, long_size = _extension(kind, reader.payload(plain_size, digest, _MAX_EXTENSION), shard, begin)
            name, size = long_name or name, long_size if long_size >= 0 else size
        else:
            raise DamageError(shard, None, f"more than {_MOST_EXTENSIONS} headers before one member, at byte {begin}")
        if block == END[:TAR_BLOCK]:
            if reader.position - begin > TAR_BLOCK:
                raise DamageError(shard, None, f"the extension header at byte {begin} has no member")
            reader.expect_end()
            return
        name, size = name or plain_name, size if size >= 0 else plain_size
        _check_name(name, kind, shard)
        offset = reader.position
        head = reader.payload(size, digest)
        if kind != _DIRECTORY:
            yield Member(name, begin, offset, size, digest.intdigest(), head)


class _Reader:
    """Counts what is read, digests it, and says where an archive ends too early."""

    def __init__(self, stream: Readable, shard: str) -> None:
        self._stream = stream
        self._shard = shard
        self.position = 0

    def block(self, digest: xxhash.xxh3_64) -> bytes:
        block = self._stream.read(TAR_BLOCK)
        if len(block) < TAR_BLOCK:
            what = "in the middle of a header" if block else "without the blocks that end an archive"
            raise DamageError(self._shard, None, f"truncated: it stops at byte {self.position + len(block)}, {what}")
        self.position += TAR_BLOCK
        digest.update(block)
        return block

    def payload(self, size: int, digest: xxhash.xxh3_64, most: int | None = None) -> bytes:
        """Pass over a payload and its padding; return its beginning, or all of it where `most` bounds it."""
        if most is not None and size > most:
            raise DamageError(self._shard, None, f"an extension header of {size} bytes at byte {self.position}")
        head, left = b"", padded_size(size)
        while left:
            piece = self._stream.read(min(left, _PIECE_BYTES))
            if not piece:
                raise DamageError(self._shard, None, f"truncated: {left} bytes are missing at byte {self.position}")
            if not head:
                head = piece[: min(size, most or _HEAD_BYTES)]
            digest.update(piece)
            self.position += len(piece)
            left -= len(piece)
        return head

    def expect_end(self) -> None:
        """After the first block of zeros, there is at least one more, and nothing but zeros."""
        rest = self.block(xxhash.xxh3_64())
        while rest:
            if rest.count(0) != len(rest):
                raise DamageError(self._shard, None, f"bytes after the end of the archive, at byte {self.position}")
            rest = self._stream.read(_PIECE_BYTES)
            self.position += len(rest)


def _parsed(block: bytes, shard: str, at: int) -> tuple[bytes, str, int]:
    """Return kind, name and size of a header."""
    if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise DamageError(shard, None, f"the header at byte {at} does not match its checksum")
    size = _number(block[124:136])
    if size is None or size < 0:
        raise DamageError(shard, None, f"the header at byte {at} has no valid size: {block[124:136]!r}")
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].split(b"\0", 1)[0]):
        name = prefix + b"/" + name
    kind = block[156:157]
    # Links and directories carry no payload, whatever their size says.
    return kind, name.decode(errors="surrogateescape"), 0 if kind in (*_REFUSED, _DIRECTORY) else size


def _number(field: bytes) -> int | None:
    if field[0] in (0x80, 0xFF):  # GNU: big-endian, for what octal digits cannot hold
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:
        return None


def _extension(kind: bytes, payload: bytes, shard: str, at: int) -> tuple[str, int]:
    """Return the name and the size that an extension header gives; '' and -1 where it gives none."""
    if kind == _LONG_NAME:
        return payload.rstrip(b"\0").decode(errors="surrogateescape"), -1
    if kind == _LONG_LINK:
        return "", -1
    name, size = "", -1
    while payload:
        length, _, _ = payload.partition(b" ")
        count = int(length) if length.isdigit() and len(length) < 10 else 0
        key, equals, value = payload[len(length) + 1 : count].partition(b"=")
        if not count or count > len(payload) or not equals or not value.endswith(b"\n"):
            raise DamageError(shard, None, f"the PAX header at byte {at} is malformed")
        if key == b"path":
            name = value[:-1].decode(errors="surrogateescape")
        elif key == b"size":
            if not value[:-1].isdigit() or len(value) > 20:
                raise DamageError(shard, None, f"the PAX header at byte {at} has no valid size: {value[:40]!r}")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise DamageError(shard, None, f"the PAX header at byte {at} describes a sparse file, which is not read")
        payload = payload[count:]
    if kind == _PAX_GLOBAL and (name or size >= 0):
        raise DamageError(shard, None, f"the PAX header at byte {at} gives all members one name or size")
    return name, size


def _check_name(name: str, kind: bytes, shard: str) -> None:
    if kind in _REFUSED:
        raise DamageError(shard, None, f"{name!r} is {_REFUSED[kind]}; a shard holds regular files only")
    if kind not in (_DIRECTORY, *_REGULAR):
        raise DamageError(shard, None, f"{name!r} is a member of unknown type {kind!r}")
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise DamageError(shard, None, f"the member name {name!r} points outside of the archive")
