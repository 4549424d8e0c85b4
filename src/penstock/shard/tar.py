"""Tar archives: writing headers, and a strict reader for archives from any program.

CPython's `tarfile` silently treats a bad header as the end of the archive. Here, anything but a regular member, a
directory or the proper end is an error that gives its byte offset.
"""

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from penstock.core.errors import DamageError, OptionError

__all__ = [
    "END",
    "MAX_HEADER_BYTES",
    "MAX_NAME",
    "TAR_BLOCK",
    "HeaderTemplate",
    "Member",
    "Readable",
    "byte_sum",
    "header",
    "padded_size",
    "plain_name",
    "read_members",
    "read_name",
]

TAR_BLOCK = 512
END = bytes(2 * TAR_BLOCK)
"""The zeros that end an archive."""

MAX_NAME = 100
"""The longest member name that a header holds, in bytes."""

_MAX_SIZE = 8**11 - 1  # eleven octal digits
_MAX_EXTENSION_BYTES = 1 << 20  # a long name or a PAX header; anything larger is an attack or an accident
_MAX_EXTENSIONS = 8  # extension headers before one member
MAX_HEADER_BYTES = TAR_BLOCK + _MAX_EXTENSIONS * (TAR_BLOCK + _MAX_EXTENSION_BYTES)
"""Size of all headers of a member, at most."""
_HEAD_BYTES = 1 << 16  # of each payload, kept in `Member.head`: the header of a .npy fits
_READ_BYTES = 1 << 20

_MODE_TO_GID = b"\x00".join((b"0000644", b"0000000", b"0000000", b""))
_MTIME = b"00000000000\x00"  # always 0, so that the same samples give the same bytes
_TAIL = (b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\x00" * 2).ljust(TAR_BLOCK - 156, b"\x00")

_REGULAR = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


def padded_size(size: int) -> int:
    """Return `size` rounded up to whole tar blocks."""
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def header(name: str, size: int) -> bytes:
    """Return the header of a regular member."""
    key, dot, suffix = name.partition(".")
    return HeaderTemplate(dot + suffix, size).header(key.encode(), byte_sum(key.encode()))


def byte_sum(key: bytes) -> int:
    """Return the sum of the bytes of a key, which is part of the checksum of its headers."""
    # The lower half of Adler-32 is 1 + the sum of the bytes; for a name, the sum stays below the modulus.
    return (zlib.adler32(key) & 0xFFFF) - 1


class HeaderTemplate:
    """The header of members that differ only in their keys; fast, because a writer makes millions of them."""

    __slots__ = ("_key_bytes", "_middle", "_rest", "_suffix", "_to_checksum", "padding", "size")

    def __init__(self, suffix: str, size: int) -> None:
        if size > _MAX_SIZE:
            raise OptionError(
                f"A tar member must have at most {_MAX_SIZE} bytes, got {suffix!r} of {size} bytes. "
                "Split it into several items."
            )
        self.size = size
        self.padding = bytes(-size % TAR_BLOCK)
        self._suffix = suffix.encode()
        self._middle = b"%b%011o\x00%b" % (_MODE_TO_GID, size, _MTIME)
        # The checksum field itself counts as eight spaces.
        self._rest = sum(self._suffix) + sum(self._middle) + 8 * ord(" ") + sum(_TAIL)
        self._key_bytes, self._to_checksum = -1, b""

    def header(self, key: bytes, key_sum: int) -> bytes:
        """Return the header of the member of `key`; `key_sum` is `byte_sum(key)`."""
        if len(key) != self._key_bytes:
            self._fit(key)
        return b"%b%b%06o\x00 %b" % (key, self._to_checksum, self._rest + key_sum, _TAIL)

    def _fit(self, key: bytes) -> None:
        """Prepare the bytes between key and checksum, which are the same for all keys of one length."""
        room = MAX_NAME - len(key)
        if len(self._suffix) > room:
            name = (key + self._suffix).decode()
            raise OptionError(
                f"A member name must have at most {MAX_NAME} bytes, got {name!r} with {len(key + self._suffix)}. "
                "Use a shorter sample id or field name."
            )
        self._key_bytes, self._to_checksum = len(key), self._suffix.ljust(room, b"\x00") + self._middle


class Readable(Protocol):
    """The input of `read_members`: a file or a stream of decompressed bytes."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file in an archive."""

    name: str
    begin: int
    """Byte offset of its first header."""

    offset: int
    """Byte offset of its payload."""

    size: int
    checksum: int
    """XXH3 of everything from `begin` to the end of the padding."""

    head: bytes
    """The first bytes of the payload."""


def read_members(stream: Readable, shard: str) -> Iterator[Member]:
    """Read a whole archive and yield its regular members; raise DamageError at the first error.

    1. The archive ends without its two tar blocks of zeros, or inside a member: it is truncated.
    2. A wrong header checksum, a size that is not a number, or bytes after the end: it is damaged.
    3. A link, device or pipe, an absolute name or one with `..`: it is refused, since no dataset needs one.
    """
    reader = _Reader(stream, shard)
    while True:
        begin, digest = reader.position, xxhash.xxh3_64()
        name, size, block = "", -1, b""
        for _ in range(_MAX_EXTENSIONS + 1):
            block = reader.read_block(digest)
            if block == END[:TAR_BLOCK]:
                break
            kind, plain_name, plain_size = _parse_header(block, shard, reader.position - TAR_BLOCK)
            if kind not in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
                break
            long_name, long_size = _parse_extension(
                kind, reader.read_payload(plain_size, digest, _MAX_EXTENSION_BYTES), shard, begin
            )
            name, size = long_name or name, long_size if long_size >= 0 else size
        else:
            raise DamageError(
                shard, None, f"more than {_MAX_EXTENSIONS} extension headers before the member at byte {begin}"
            )
        if block == END[:TAR_BLOCK]:
            if reader.position - begin > TAR_BLOCK:
                raise DamageError(shard, None, f"the extension header at byte {begin} has no member")
            reader.expect_end()
            return
        name, size = name or plain_name, size if size >= 0 else plain_size
        _check_name(name, kind, shard)
        offset = reader.position
        head = reader.read_payload(size, digest)
        if kind != _DIRECTORY:
            yield Member(name, begin, offset, size, digest.intdigest(), head)


def plain_name(block: bytes) -> bytes:
    """Return the name in a header, without looking at its checksum or at extension headers before it."""
    name = block[:100].split(b"\0", 1)[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def read_name(headers: bytes, shard: str) -> str:
    """Return the name of a member, given all its header blocks; raise DamageError if they are malformed."""
    reader, digest, name = _Reader(io.BytesIO(headers), shard), xxhash.xxh3_64(), ""
    for _ in range(_MAX_EXTENSIONS + 1):
        kind, plain_name, size = _parse_header(reader.read_block(digest), shard, 0)
        if kind not in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            return name or plain_name
        payload = reader.read_payload(size, digest, _MAX_EXTENSION_BYTES)
        name = _parse_extension(kind, payload, shard, 0)[0] or name
    raise DamageError(shard, None, f"more than {_MAX_EXTENSIONS} extension headers before a member")


class _Reader:
    """Reads an archive, counts and digests the bytes, and reports where it ends too early."""

    def __init__(self, stream: Readable, shard: str) -> None:
        self._stream = stream
        self._shard = shard
        self.position = 0

    def read_block(self, digest: xxhash.xxh3_64) -> bytes:
        block = self._stream.read(TAR_BLOCK)
        if len(block) < TAR_BLOCK:
            where = "inside a header" if block else "without the tar blocks that end an archive"
            raise DamageError(self._shard, None, f"truncated: it stops at byte {self.position + len(block)}, {where}")
        self.position += TAR_BLOCK
        digest.update(block)
        return block

    def read_payload(self, size: int, digest: xxhash.xxh3_64, max_bytes: int | None = None) -> bytes:
        """Read a payload and its padding; return its first bytes, or all of it if `max_bytes` is given."""
        if max_bytes is not None and size > max_bytes:
            raise DamageError(
                self._shard,
                None,
                f"the extension header at byte {self.position} must have at most {max_bytes} bytes, got {size}",
            )
        head, left = b"", padded_size(size)
        while left:
            content = self._stream.read(min(left, _READ_BYTES))
            if not content:
                raise DamageError(self._shard, None, f"truncated: {left} bytes are missing at byte {self.position}")
            if not head:
                head = content[: min(size, max_bytes or _HEAD_BYTES)]
            digest.update(content)
            self.position += len(content)
            left -= len(content)
        return head

    def expect_end(self) -> None:
        """Check that at least one more tar block of zeros follows the first one, and nothing but zeros."""
        rest = self.read_block(xxhash.xxh3_64())
        while rest:
            if rest.count(0) != len(rest):
                raise DamageError(self._shard, None, f"bytes after the end of the archive, at byte {self.position}")
            rest = self._stream.read(_READ_BYTES)
            self.position += len(rest)


def _parse_header(block: bytes, shard: str, at: int) -> tuple[bytes, str, int]:
    """Return the kind, name and size that a header gives."""
    if _parse_number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise DamageError(shard, None, f"the header at byte {at} does not match its checksum")
    size = _parse_number(block[124:136])
    if size is None or size < 0:
        raise DamageError(shard, None, f"the header at byte {at} has an invalid size: {block[124:136]!r}")
    name, kind = plain_name(block), block[156:157]
    # Links and directories have no payload, whatever their size field says.
    return kind, name.decode(errors="surrogateescape"), 0 if kind in (*_REFUSED, _DIRECTORY) else size


def _parse_number(field: bytes) -> int | None:
    if field[0] in (0x80, 0xFF):  # GNU: big-endian, for sizes beyond eleven octal digits
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:
        return None


def _parse_extension(kind: bytes, payload: bytes, shard: str, at: int) -> tuple[str, int]:
    """Return the name and size that an extension header gives, or '' and -1."""
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
                raise DamageError(shard, None, f"the PAX header at byte {at} has an invalid size: {value[:40]!r}")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise DamageError(
                shard, None, f"the PAX header at byte {at} describes a sparse file, which is not supported"
            )
        payload = payload[count:]
    if kind == _PAX_GLOBAL and (name or size >= 0):
        raise DamageError(shard, None, f"the global PAX header at byte {at} gives all members the same name or size")
    return name, size


def _check_name(name: str, kind: bytes, shard: str) -> None:
    if kind in _REFUSED:
        raise DamageError(shard, None, f"{name!r} is {_REFUSED[kind]}; a shard must hold only regular files")
    if kind not in (_DIRECTORY, *_REGULAR):
        raise DamageError(shard, None, f"{name!r} has the unknown member type {kind!r}")
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise DamageError(shard, None, f"the member name {name!r} points outside the archive")
