"""Zip archives in memory, such as `.npz` and `.pt`: nothing is inflated beyond what an item may expand to."""

import io
import struct
import zipfile
import zlib

from penstock.core.limits import check_expansion

__all__ = ["BoundedZip"]

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # bzip2 and xz inflate a block at once, whatever its size
_ENCRYPTED = 0x1
_LOCAL = struct.Struct("<26x2H")  # …, lengths of name and extra


class BoundedZip:
    """A zip archive whose members are read one at a time.

    The sizes in its directory must be within the limit together, also if members overlap. A member is inflated up to
    its size in the directory; one that is larger or smaller is damaged.

    Parameters
    ----------
    error
        What is raised if it is refused or damaged.

    Attributes
    ----------
    names
        Name to entry of the directory.
    """

    def __init__(self, payload: bytes, error: type[ValueError] = ValueError) -> None:
        self._error = error
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            entries = archive.infolist()
        check_expansion("it", sum(entry.file_size for entry in entries), len(payload), error=error)
        self._payload = memoryview(payload)
        self.names = {entry.filename: entry for entry in entries}

    def read(self, name: str) -> memoryview:
        """Return the content of a member, whose checksum is correct; of a stored one without copying it."""
        entry = self.names.get(name)
        if entry is None:
            raise self._error(f"it has no member {name!r}")
        if entry.compress_type not in _METHODS or entry.flag_bits & _ENCRYPTED:
            raise self._error(f"the member {name!r} must be stored or deflated, and not encrypted")
        begin = self._find_data(entry)
        stored = self._payload[begin : begin + entry.compress_size]
        content = stored
        if entry.compress_type == zipfile.ZIP_DEFLATED:
            content = memoryview(zlib.decompressobj(-15).decompress(stored, entry.file_size + 1))
        if len(stored) != entry.compress_size or len(content) != entry.file_size:
            raise self._error(f"the member {name!r} should have {entry.file_size} bytes, but has others")
        if zlib.crc32(content) != entry.CRC:
            raise self._error(f"the checksum of the member {name!r} does not match")
        return content

    def _find_data(self, entry: zipfile.ZipInfo) -> int:
        """Return the offset of the content of a member, which its own header says."""
        head = bytes(self._payload[entry.header_offset : entry.header_offset + _LOCAL.size])
        if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
            raise self._error(f"the member {entry.filename!r} has no header at byte {entry.header_offset}")
        name_bytes, extra_bytes = _LOCAL.unpack(head)
        begin: int = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
        return begin
