"""Requests by a process of their own, for a forked child: obstore's threads do not survive the fork."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.files.stores.clients.client_process import receive_into, receive_message, send_message
from penstock.files.stores.clients.obstore_client import ObstoreSettings
from penstock.files.stores.errors import RequestError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import ObjectInfo

__all__ = ["ProcessClient"]

_PATIENCE_SECONDS = 10.0
"""How much later than a request may take its answer may come."""

# 1. A request takes a connection that no other thread uses, or makes one: a pair of sockets, of which the client
#    process is sent one.
# 2. The client process dies, or does not answer: RequestError "again"; the process is ended, the next request starts
#    another one.
# 3. This process dies, also by kill -9: the client process sees that it has another parent, and ends.
# 4. This process forks: the child closes what it inherited, and starts a client process of its own.


class ProcessClient:
    """Requests by a client process, as `ObstoreClient` does them."""

    def __init__(self, settings: ObstoreSettings, options: StoreOptions) -> None:
        self._settings, self._options = settings, options
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[socket.socket] = []

    def describe(self, path: str, seconds: float) -> ObjectInfo:
        """Return size and version of an object."""
        return ObjectInfo(*self._ask(seconds, ("describe", path, seconds)))

    def read_range(self, path: str, begin: int, n_bytes: int, version: str | None, seconds: float) -> memoryview:
        """Return so many bytes from `begin` on."""
        out = np.empty(n_bytes, np.uint8).data
        self._ask(seconds, ("read_range", path, begin, n_bytes, version, seconds), out=out)
        return out

    def read_object(self, path: str, version: str | None, seconds: float) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        content, info = self._ask(seconds, ("read_object", path, version, seconds))
        return content, ObjectInfo(*info)

    def list_objects(self, prefix: str, after: str | None, seconds: float) -> Iterator[list[ObjectInfo]]:
        """Yield the objects below a folder in groups."""
        connection = self._connect(seconds)
        try:
            send_message(connection, ("list_objects", prefix, after, seconds))
            while (group := self._receive(connection)) is not None:
                yield [ObjectInfo(*info) for info in group]
        except (OSError, EOFError) as error:
            connection.close()
            raise self._give_up(error) from error
        except BaseException:  # also of a caller who needs no more
            connection.close()
            raise
        self._idle.append(connection)

    def list_folder(self, prefix: str, seconds: float) -> tuple[list[str], list[ObjectInfo]]:
        """Return the names of the folders in a folder, and the objects in it."""
        folders, objects = self._ask(seconds, ("list_folder", prefix, seconds))
        return list(folders), [ObjectInfo(*info) for info in objects]

    def put(self, path: str, content: bytes | memoryview, if_absent: bool, seconds: float) -> bool:
        """Write an object; return False if it was there and `if_absent`."""
        return bool(self._ask(seconds, ("put", path, if_absent, seconds), content=content))

    def put_file(self, path: str, file: str) -> None:
        """Write the content of a large file, which may take as long as it is large."""
        self._ask(None, ("put_file", path, file))

    def remove(self, path: str, seconds: float) -> None:
        """Remove an object."""
        self._ask(seconds, ("remove", path, seconds))

    def close(self) -> None:
        """End the client process."""
        with self._lock:
            process, self._process = self._process, None
            self._close_connections()
        if process is not None:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """Close the connections of the parent process, in a child that has inherited them."""
        self._close_connections()
        if self._process is not None:
            self._process.returncode = 0  # the child of the parent: not ours to wait for

    def _ask(
        self, seconds: float | None, message: Any, *, content: bytes | memoryview = b"", out: memoryview | None = None
    ) -> Any:
        connection = self._connect(seconds)
        try:
            send_message(connection, message, content)
            answer = self._receive(connection, out)
        except RequestError:
            self._idle.append(connection)
            raise
        except (OSError, EOFError) as error:
            connection.close()
            raise self._give_up(error) from error
        except BaseException:  # an interrupt: what comes next on this connection is not known
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def _receive(self, connection: socket.socket, out: memoryview | None = None) -> Any:
        (kind, answer), n_bytes = receive_message(connection)
        if kind == "error":
            raise answer
        if out is not None and n_bytes == len(out):
            receive_into(connection, out)
        return answer

    def _connect(self, seconds: float | None) -> socket.socket:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open_connection()
        connection.settimeout(None if seconds is None else seconds + _PATIENCE_SECONDS)
        return connection

    def _open_connection(self) -> socket.socket:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._process = None
            if self._process is None or self._control is None:
                self._start()
            assert self._control is not None
            here, there = socket.socketpair()
            with there:
                try:
                    socket.send_fds(self._control, [b"+"], [there.fileno()])
                except OSError as error:
                    here.close()
                    raise RequestError("again", "the client process ended") from error
            return here

    def _start(self) -> None:
        self._close_connections()
        if not sys.executable:
            raise RequestError("refused", "a forked process needs a Python program to read URLs, and there is none")
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(  # noqa: S603  # this Python
                [sys.executable, "-m", "penstock.files.stores.clients.client_process", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._control = here
        try:
            send_message(here, (os.getpid(), self._settings, self._options))
        except OSError as error:
            raise RequestError("again", "the client process ended") from error

    def _close_connections(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        while self._idle:
            self._idle.pop().close()

    def _give_up(self, error: Exception) -> RequestError:
        """End a client process that hangs; the next request starts another one."""
        if isinstance(error, TimeoutError):
            self.close()
            return RequestError("again", "the client process did not answer")
        return RequestError("again", "the client process ended")
