"""The client process of a forked child: `python -m penstock.files.stores.clients.client_process DESCRIPTOR`.

It does single requests with obstore, for as long as its parent lives; see `process_client.py`.
"""

import contextlib
import functools
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.core.errors import PenstockError
from penstock.files.stores.clients.obstore_client import ObstoreClient
from penstock.files.stores.errors import RequestError

__all__ = ["main", "receive_into", "receive_message", "send_message"]

_POLL_SECONDS = 0.5
_HEAD = struct.Struct("<QQ")  # bytes of the pickled value, and of what follows it


def main(descriptor: int) -> None:
    """Serve connections until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    control = socket.socket(fileno=descriptor)
    (parent, settings, options), _ = receive_message(control)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    open_client = functools.cache(lambda: ObstoreClient(settings, options))
    while True:
        said, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not said:
            os._exit(0)  # requests that are under way have nobody who waits for them
        connection = socket.socket(fileno=descriptors[0])
        threading.Thread(target=_serve, args=(open_client, connection), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when it has another parent: grandchildren of it may still hold its connections."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


def _serve(open_client: Callable[[], ObstoreClient], connection: socket.socket) -> None:
    """Answer the requests of a connection."""
    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            (name, *args), n_bytes = receive_message(connection)
            content = bytearray(n_bytes)
            receive_into(connection, memoryview(content))
            try:
                _answer(open_client(), connection, (name, args, content))
            except (RequestError, PenstockError) as error:
                send_message(connection, ("error", error))


def _answer(client: ObstoreClient, connection: socket.socket, message: tuple[str, list[Any], bytearray]) -> None:
    """Carry out a request."""
    name, args, content = message
    if name == "read_range":
        send_message(connection, ("ok", None), client.read_range(*args))
    elif name == "list_objects":
        for group in client.list_objects(*args):
            send_message(connection, ("ok", [tuple(info) for info in group]))
        send_message(connection, ("ok", None))
    elif name == "put":
        path, if_absent, seconds = args
        send_message(connection, ("ok", client.put(path, bytes(content), if_absent, seconds)))
    else:
        send_message(connection, ("ok", getattr(client, name)(*args)))


# -- what a forked child and its client process send each other: a pickled value, and bytes that follow it -------------


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
