"""The client process of a forked child: `python -m penstock.files.stores.clients.client_process DESCRIPTOR`.

It does single requests with obstore, for as long as its parent lives; see `process_client.py`.
"""

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.core.errors import PenstockError
from penstock.files.stores.clients.messages import receive_into, receive_message, send_message
from penstock.files.stores.clients.obstore_client import ObstoreClient
from penstock.files.stores.errors import RequestError
from penstock.files.stores.protocol import ClientUpload

__all__ = ["main"]

_POLL_SECONDS = 0.5


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
    upload: ClientUpload | None = None
    with connection, contextlib.suppress(OSError, EOFError):
        try:
            while True:
                (name, *args), n_bytes = receive_message(connection)
                content = bytearray(n_bytes)
                receive_into(connection, memoryview(content))
                try:
                    if name == "open_upload":
                        upload = open_client().open_upload(*args)
                        send_message(connection, ("ok", None))
                    else:
                        _answer(open_client(), connection, (name, args, content), upload)
                except (RequestError, PenstockError) as error:
                    send_message(connection, ("error", error))
                if name in ("finish", "abort"):
                    upload = None
        finally:
            if upload is not None:
                upload.abort()


def _answer(
    client: ObstoreClient,
    connection: socket.socket,
    message: tuple[str, list[Any], bytearray],
    upload: ClientUpload | None,
) -> None:
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
    elif name == "write" and upload is not None:
        upload.write(bytes(content))
        send_message(connection, ("ok", None))
    elif name in ("finish", "abort") and upload is not None:
        getattr(upload, name)()
        send_message(connection, ("ok", None))
    else:
        send_message(connection, ("ok", getattr(client, name)(*args)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
