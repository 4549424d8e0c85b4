"""Requests and answers of HTTP, from a file or from another server; see `penstock_remote_server`."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, unquote

__all__ = ["PIECE", "Answer", "HangupError", "Request", "Upstream", "nothing", "parse_range", "read_file"]

PIECE = 1 << 18
"""Bytes that are passed on at a time."""


class Request:
    """A request: its first line and its headers."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        self.method, self.target, _ = first.split(" ", 2)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (li.partition(":") for li in lines)}
        path, _, self.query = self.target.partition("?")
        self.key = unquote(path).lstrip("/")
        self.operation = self.method
        """The method, or LIST."""
        if "list-type=" in self.query:
            self.bucket = self.key.strip("/")
            self.operation = "LIST"
            self.key = f"{self.bucket}/{parse_qs(self.query).get('prefix', [''])[0]}"

    @property
    def n_body(self) -> int:
        return int(self.headers.get("content-length", 0))


class Answer:
    """An answer whose body is still to come."""

    def __init__(self, status: int, headers: dict[str, str], body: AsyncIterator[bytes] | None = None) -> None:
        self.status, self.headers, self.body = status, headers, body

    @classmethod
    def of(cls, status: int, content: bytes = b"", **headers: str) -> "Answer":
        async def body() -> AsyncIterator[bytes]:
            yield content

        return cls(status, {**headers, "content-length": str(len(content))}, body())

    def head(self) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return f"HTTP/1.1 {self.status} Answer\r\n{lines}\r\n".encode("latin-1")


class HangupError(Exception):
    """The connection ends."""


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return content


async def read_file(handle: int, begin: int, end: int) -> AsyncIterator[bytes]:
    try:
        while begin < end:
            piece = os.pread(handle, min(PIECE, end - begin), begin)
            if not piece:
                raise HangupError
            begin += len(piece)
            yield piece
    finally:
        os.close(handle)


def parse_range(asked: str, size: int) -> tuple[int, int, bool]:
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if found is None:
        return 0, size, False
    if not found[1]:
        return max(0, size - int(found[2])), size, True
    return int(found[1]), min(size, int(found[2]) + 1) if found[2] else size, True


class Upstream:
    """The connection to rclone that belongs to one of a client."""

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, reader: asyncio.StreamReader, request: Request) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        up_reader, up_writer = self._streams
        up_writer.write(request.head)
        left = request.n_body
        while left:
            piece = await reader.read(min(left, PIECE))
            if not piece:
                raise HangupError
            left -= len(piece)
            up_writer.write(piece)
            await up_writer.drain()
        head = await up_reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head = await up_reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if request.method == "HEAD" or status in (204, 304):
            return Answer(status, headers)
        if "chunked" in headers.pop("transfer-encoding", ""):
            return Answer.of(status, await _read_chunks(up_reader), **headers)
        return Answer(status, headers, self._body(int(headers.get("content-length", 0))))

    async def _body(self, left: int) -> AsyncIterator[bytes]:
        assert self._streams is not None
        while left:
            piece = await self._streams[0].read(min(left, PIECE))
            if not piece:
                raise HangupError
            left -= len(piece)
            yield piece

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
