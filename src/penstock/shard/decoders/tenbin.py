"""Lists of arrays in the `.ten` format of the webdataset library.

Chunks of a magic number, a length and that many bytes, padded to 64; each array is a header chunk and a data chunk.
"""

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["decode_tenbin"]

_MAGIC = b"~TenBin~"
_ALIGNMENT = 64
_DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_MAX_AXES = 64  # of numpy


def decode_tenbin(payload: bytes) -> list[NDArray[Any]]:
    """Return the arrays; raise ValueError if a chunk is longer than the payload, or an array than its chunk."""
    chunks = _split_chunks(memoryview(payload))
    if len(chunks) % 2:
        raise ValueError("its last array has no data")
    return [_make_array(header, data) for header, data in zip(chunks[::2], chunks[1::2], strict=True)]


def _split_chunks(payload: memoryview) -> list[memoryview]:
    chunks, offset = [], 0
    while offset < len(payload):
        if payload[offset : offset + 8] != _MAGIC or offset + 16 > len(payload):
            raise ValueError(f"no chunk begins at byte {offset}")
        (size,) = struct.unpack("<q", payload[offset + 8 : offset + 16])
        offset += 16
        if not 0 <= size <= len(payload) - offset:
            raise ValueError(f"the chunk at byte {offset} should have {size} bytes, but {len(payload) - offset} follow")
        chunks.append(payload[offset : offset + size])
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return chunks


def _make_array(header: memoryview, data: memoryview) -> NDArray[Any]:
    code = bytes(header[:8]).rstrip(b"\0").decode("ascii", "replace")
    if len(header) < 24 or len(header) % 8 or code not in _DTYPES:
        raise ValueError(f"an array has the unknown type {code!r}, or no valid header")
    n_axes, *lengths = struct.unpack(f"<{len(header) // 8 - 2}q", header[16:])
    if not 0 <= n_axes <= min(len(lengths), _MAX_AXES) or min(lengths[:n_axes], default=0) < 0:
        raise ValueError(f"an array has an invalid shape: {n_axes} axes of {lengths[:8]}")
    dtype, shape = np.dtype(f"<{code}"), tuple(lengths[:n_axes])
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes > len(data):
        raise ValueError(f"{dtype} {shape} needs {n_bytes} bytes, but {len(data)} bytes of data follow")
    return np.frombuffer(bytearray(data[:n_bytes]), dtype).reshape(shape)  # writable
