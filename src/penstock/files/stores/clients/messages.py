"""What a forked child and its client process send each other: a pickled value, and bytes that follow it."""

import pickle
import socket
import struct
from typing import Any

__all__ = ["receive_into", "receive_message", "send_message"]

_HEAD = struct.Struct("<QQ")
"""Bytes of the pickled value, and of what follows it."""


def send_message(to: socket.socket, value: Any, content: bytes | bytearray | memoryview = b"") -> None:
    """Send a value and bytes."""
    pickled = pickle.dumps(value)
    view = memoryview(content).cast("B")
    to.sendall(_HEAD.pack(len(pickled), len(view)) + pickled)
    if len(view):
        to.sendall(view)


def receive_message(source: socket.socket) -> tuple[Any, int]:
    """Return a value, and how many bytes follow it; raise EOFError if the other side has ended."""
    n_pickled, n_bytes = _HEAD.unpack(_receive(source, _HEAD.size))
    return pickle.loads(_receive(source, n_pickled)), n_bytes


def receive_into(source: socket.socket, out: memoryview) -> None:
    """Fill `out` with bytes that follow a value."""
    done = 0
    while done < len(out):
        n_bytes = source.recv_into(out[done:])
        if n_bytes == 0:
            raise EOFError
        done += n_bytes


def _receive(source: socket.socket, n_bytes: int) -> bytes:
    content = bytearray(n_bytes)
    receive_into(source, memoryview(content))
    return bytes(content)
