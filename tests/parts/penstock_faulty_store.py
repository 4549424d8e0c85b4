"""A folder served over HTTP on this machine, which answers as badly as a test asks for."""

import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["FaultyStore", "serve_folder"]


class FaultyStore(ThreadingHTTPServer):
    """Serves a folder; `fault` gives what happens to a request for a path, or None.

    A number is the status of the answer. "reset" ends the connection in the middle of the body, "short" closes it
    there, "long" announces more bytes than there are, "huge" 10^15, "cut" announces and sends half of them, "stall"
    answers nothing.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fault: Callable[[str], Any] = lambda path: None
        self.asked: list[str] = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyStore

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        self.server.asked.append(self.path)
        file = self.server.folder / self.path.lstrip("/")
        fault = self.server.fault(self.path)
        if fault == "stall":
            self.server.stopped.wait()
        elif isinstance(fault, int) or not file.is_file():
            self.send_response(fault or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            whole = file.read_bytes()
            self._send(self._range_of(whole), whole, fault, has_body=has_body)

    def _range_of(self, content: bytes) -> bytes:
        """Begin the answer; return the bytes that were asked for."""
        asked = self.headers.get("Range")
        self.send_response(206 if asked else 200)
        if not asked:
            return content
        first, last = asked.removeprefix("bytes=").split("-")
        start = int(first) if first else max(0, len(content) - int(last))
        stop = min(len(content), int(last) + 1) if first and last else len(content)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        return content[start:stop]

    def _send(self, content: bytes, whole: bytes, fault: Any, *, has_body: bool) -> None:
        half = len(content) // 2
        length = {"long": len(content) + 100, "cut": half, "huge": 10**15}.get(fault, len(content))
        self.send_header("Content-Length", str(length))
        self.send_header("Last-Modified", "Tue, 03 Nov 2026 10:00:00 GMT")
        self.send_header("ETag", f'"{zlib.crc32(whole)}"')  # without one, obstore does not continue a body
        self.end_headers()
        if has_body:
            self.wfile.write(content[:half] if fault in ("reset", "short") else content[:length])
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = fault is not None


@contextmanager
def serve_folder(folder: Path) -> Iterator[FaultyStore]:
    """Serve a folder until the end of the block."""
    with FaultyStore(folder) as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield store
        finally:
            store.stopped.set()
            store.shutdown()
            thread.join()
