"""A server that answers as badly as a test asks for: a folder over HTTP, or in front of `rclone serve s3`.

Started by `penstock_remote`, in a process of its own: it prints its port, and ends with the process that started it.
It speaks S3 where rclone does not: ranges are answered with 206, objects have an ETag by their file, If-Match and
If-None-Match are answered with 412. It adds latency and limits bandwidth, counts, and breaks answers by rules.
"""

import asyncio
import contextlib
import ctypes
import fnmatch
import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from penstock_remote_answers import (
    PIECE,
    Answer,
    HangupError,
    Request,
    Upstream,
    nothing,
    parse_range,
    read_file,
)

_CONTROL = "/-/control"
_REMEMBERED = 0.02  # seconds, more than rclone remembers a folder that others change


class Rules:
    """What is broken: each rule has a kind, and says which requests it means."""

    def __init__(self, given: list[dict[str, Any]]) -> None:
        self._rules = [{"method": "*", "key": "*", "skip": 0, "times": None, "seen": 0, **rule} for rule in given]

    def find(self, request: Request) -> dict[str, Any] | None:
        for rule in self._rules:
            if not fnmatch.fnmatchcase(request.operation, rule["method"]):
                continue
            if not fnmatch.fnmatchcase(request.key, rule["key"]):
                continue
            seen, rule["seen"] = rule["seen"], rule["seen"] + 1
            if seen >= rule["skip"] and (rule["times"] is None or seen < rule["skip"] + rule["times"]):
                return rule
        return None


class Server:
    """Answers requests from a folder, or from rclone, which serves the same folder."""

    def __init__(self, folder: Path, upstream: int | None, *, direct: bool) -> None:
        self.folder, self.upstream, self.direct = folder, upstream, direct
        self.latency, self.bandwidth, self.free_at = 0.0, 0.0, 0.0
        self.rules = Rules([])
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.reset_counts()

    def reset_counts(self) -> None:
        self.counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self.log: list[list[Any]] = []
        self.in_flight: set[Request] = set()  # those since the reset; earlier ones may still be on their way
        self.most_in_flight = 0

    # -- control -------------------------------------------------------------------------------------------------------

    def control(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Set what is given, and return all counts, which are set to zero afterwards if `reset`."""
        self.latency = asked.get("latency", self.latency)
        self.bandwidth = asked.get("bandwidth", self.bandwidth)
        self.direct = asked.get("direct", self.direct)
        if "rules" in asked:
            self.rules = Rules(asked["rules"])
        rows = [[method, key, *numbers] for (method, key), numbers in self.counts.items()]
        found = {"counts": rows, "log": self.log, "most_in_flight": self.most_in_flight}
        if asked.get("reset"):
            self.reset_counts()
        return found

    # -- connections ---------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        upstream = Upstream(self.upstream)
        try:
            while True:
                request = Request(await reader.readuntil(b"\r\n\r\n"))
                if request.headers.get("expect", "").lower() == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if request.target == _CONTROL:
                    asked = json.loads(await reader.readexactly(request.n_body))
                    await self.send(writer, request, Answer.of(200, json.dumps(self.control(asked)).encode()))
                    continue
                await self.serve_one(reader, writer, request, upstream)
        except (asyncio.IncompleteReadError, ConnectionError, HangupError):
            pass
        finally:
            upstream.close()
            writer.close()

    async def serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, upstream: "Upstream"
    ) -> None:
        in_flight = self.in_flight
        in_flight.add(request)
        self.most_in_flight = max(self.most_in_flight, len(in_flight))
        numbers = self.counts[request.operation, request.key]
        numbers[0] += 1
        numbers[2] += request.n_body
        entry = [request.operation, request.key, request.headers.get("range", ""), 0]
        self.log.append(entry)
        try:
            rule = self.rules.find(request)
            await asyncio.sleep(self.latency)
            answer = await self.answer(reader, request, upstream, rule)
            entry[3] = answer.status
            await self.send(writer, request, answer, rule, numbers)
        finally:
            in_flight.discard(request)

    async def answer(
        self, reader: asyncio.StreamReader, request: Request, upstream: "Upstream", rule: dict[str, Any] | None
    ) -> Answer:
        """Return what is answered before a rule breaks the body."""
        kind = rule["kind"] if rule else ""
        if rule and kind == "stall" and not rule.get("in_body"):
            await asyncio.sleep(rule["seconds"])
        if rule and kind == "token" and request.headers.get("authorization") != rule["token"]:
            await self.skip_body(reader, request)
            return Answer.of(401)
        if rule and kind == "whole":
            request.headers.pop("range", None)
        if rule and kind == "replace":
            (self.folder / request.key).write_bytes(bytes.fromhex(rule["content"]))
            await asyncio.sleep(_REMEMBERED)
        if rule and kind in ("status", "drop"):
            await self.skip_body(reader, request)
            if kind == "drop":
                raise HangupError
            headers = {"retry-after": str(rule["retry_after"])} if rule.get("retry_after") is not None else {}
            content = f"<Error><Code>{rule.get('code', '')}</Code><Message>as asked</Message></Error>".encode()
            return Answer.of(rule["status"], content, **headers)
        if self.upstream is None or (self.direct and request.method in ("GET", "HEAD") and not request.query):
            await self.skip_body(reader, request)
            return self.answer_file(request)
        if request.method == "POST" and request.query == "delete":
            return await self.remove(request, await reader.readexactly(request.n_body))
        if request.method == "PUT" and request.headers.get("if-none-match") == "*":
            async with self.locks[request.key]:  # so that of two who write if there is nothing, one is refused
                if (self.folder / request.key).is_file():
                    await self.skip_body(reader, request)
                    return Answer.of(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                answer = await upstream.ask(reader, request)
        else:
            answer = await upstream.ask(reader, request)
        if kind == "lost":
            raise HangupError
        return await self.mend(request, answer)

    async def remove(self, request: Request, body: bytes) -> Answer:
        """Remove objects: not by rclone, which waits for itself for ever if others are written meanwhile."""
        keys = [html.unescape(found) for found in re.findall(r"<Key>(.*?)</Key>", body.decode())]
        for key in keys:
            (self.folder / request.key / key).unlink(missing_ok=True)
        await asyncio.sleep(_REMEMBERED)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return Answer.of(200, f"<DeleteResult>{gone}</DeleteResult>".encode(), **{"content-type": "application/xml"})

    async def skip_body(self, reader: asyncio.StreamReader, request: Request) -> None:
        left = request.n_body
        while left:
            left -= len(await reader.readexactly(min(left, PIECE)))

    async def mend(self, request: Request, answer: Answer) -> Answer:
        """Return what S3 would answer."""
        if request.operation == "LIST" and answer.status == 200:
            content = b"".join([piece async for piece in answer.body or nothing()])

            def tag(key: str) -> str:
                return self.tag(f"{request.bucket}/{html.unescape(key)}")

            text = re.sub(
                r"<Key>(.*?)</Key>(.*?)<ETag></ETag>",
                lambda found: f"<Key>{found[1]}</Key>{found[2]}<ETag>&quot;{tag(found[1])}&quot;</ETag>",
                content.decode(),
                flags=re.DOTALL,
            )
            return Answer.of(200, text.encode(), **{"content-type": "application/xml"})
        if answer.status >= 300 or request.query:
            return answer
        answer.headers["etag"] = quoted = f'"{self.tag(request.key)}"'
        if "content-range" in answer.headers:
            answer.status = 206
        condition = request.headers.get("if-match")
        if condition is not None and condition not in (quoted, "*"):
            async for _ in answer.body or nothing():
                pass
            return Answer.of(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return answer

    def tag(self, key: str) -> str:
        """Return the ETag of a file: by its content's place and time, not by its bytes."""
        try:
            status = (self.folder / key).stat()
        except OSError:
            return "gone"
        return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"

    def answer_file(self, request: Request) -> Answer:
        """Answer with a file of the folder, or a range of it."""
        path = self.folder / request.key
        if request.method not in ("GET", "HEAD"):
            return Answer.of(405)
        if not path.is_file():
            return Answer.of(404)
        handle = os.open(path, os.O_RDONLY)
        status = os.fstat(handle)
        size, tag = status.st_size, f'"{self.tag(request.key)}"'
        begin, end, is_range = parse_range(request.headers.get("range", ""), size)
        if (begin >= end and is_range) or request.headers.get("if-match", tag) not in (tag, "*"):
            os.close(handle)
            return Answer.of(412 if begin < end else 416)
        headers = {
            "content-length": str(end - begin),
            "accept-ranges": "bytes",
            "etag": tag,
            "last-modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime)),
        }
        if is_range:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{size}"
        return Answer(206 if is_range else 200, headers, read_file(handle, begin, end))

    # -- answers -------------------------------------------------------------------------------------------------------

    async def send(
        self,
        writer: asyncio.StreamWriter,
        request: Request,
        answer: Answer,
        rule: dict[str, Any] | None = None,
        numbers: list[int] | None = None,
    ) -> None:
        """Send an answer, broken as a rule says."""
        length = int(answer.headers.get("content-length", 0))
        kind = rule["kind"] if rule else ""
        has_body = request.method != "HEAD" and answer.status not in (204, 304)
        if kind == "wrong_length":
            answer.headers["content-length"] = str(max(0, length + rule["by"])) if rule else ""
        writer.write(answer.head())
        left = length if not has_body or not rule else self.limit(rule, length)
        async for piece in answer.body or nothing():
            if not has_body:
                continue
            part = piece[:left]
            left -= len(part)
            if self.bandwidth:
                await self.pace(len(part))
            for at in range(0, len(part) if rule and kind == "drip" else 0, 10):
                if writer.is_closing():
                    raise HangupError
                writer.write(part[at : at + 10])
                await asyncio.sleep(rule["seconds"] if rule else 0.0)
            writer.write(part)
            await writer.drain()
            if numbers is not None:
                numbers[1] += len(part)
            if rule and left == 0 and kind != "wrong_length":
                await self.break_off(writer, rule)
        if rule and kind == "wrong_length" and has_body:
            writer.write(b"\0" * max(0, rule["by"]))
        await writer.drain()

    def limit(self, rule: dict[str, Any], length: int) -> int:
        """Return how much of a body is sent."""
        if rule["kind"] == "wrong_length":
            return min(length, max(0, length + int(rule["by"])))
        is_cut = rule["kind"] in ("reset", "short") or (rule["kind"] == "stall" and rule.get("in_body"))
        return length // 2 if is_cut else length

    async def break_off(self, writer: asyncio.StreamWriter, rule: dict[str, Any]) -> None:
        if rule["kind"] == "reset":
            await asyncio.sleep(0.02)  # so that the half of the body arrives first
            writer.transport.abort()
            raise HangupError
        if rule["kind"] == "short":
            raise HangupError
        if rule["kind"] == "stall" and rule.get("in_body"):
            await asyncio.sleep(rule["seconds"])
            raise HangupError

    async def pace(self, n_bytes: int) -> None:
        """Wait as long as these bytes take on a line that all connections share."""
        now = time.monotonic()
        self.free_at = max(now, self.free_at) + n_bytes / self.bandwidth
        if self.free_at - now > 0.001:
            await asyncio.sleep(self.free_at - now)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also if the parent is killed


def start_rclone(program: str, folder: str) -> tuple[subprocess.Popen[str], int]:
    """Start `rclone serve s3` on a free port; return it when it answers."""
    # Its own ETags are checksums of the whole file, for each request. It needs a whole CPU after something was written
    # if folders are not remembered at all.
    options = ("--auth-key", "penstockkey,penstocksecret", "--addr", "127.0.0.1:0", "--etag-hash", "")
    quick = ("--vfs-cache-mode", "off", "--dir-cache-time", "1ms", "--vfs-read-wait", "0", "--buffer-size", "0")
    command = [program, "serve", "s3", *options, *quick, "--config", "/dev/null", folder]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509  # no thread runs yet
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        found = re.search(r"Starting s3 server on \[http://127\.0\.0\.1:(\d+)", line)
        if found:
            return process, int(found[1])
    raise RuntimeError(f"rclone did not start: {said}")


async def main(folder: str, program: str) -> None:
    parent, ended = os.getppid(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    rclone, port = start_rclone(program, folder) if program else (None, None)
    if rclone is not None and rclone.stderr is not None:
        asyncio.get_running_loop().run_in_executor(None, rclone.stderr.read)  # so that it never waits to be read
    try:
        server = await asyncio.start_server(
            Server(Path(folder), port, direct=False).serve, "127.0.0.1", 0, limit=1 << 20, backlog=512
        )
        print(server.sockets[0].getsockname()[1], flush=True)
        while os.getppid() == parent and not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.5)
    finally:
        if rclone is not None:
            rclone.kill()
            rclone.wait()
    os._exit(0)  # without a word on the connections that are still open


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
