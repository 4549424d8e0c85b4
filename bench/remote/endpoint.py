"""The endpoint that all contenders share: the one of the tests, 20 ms away, with 150 MB/s for all of its connections.

It is `rclone serve s3` behind a proxy in a process of its own, which reads objects from their files, adds the latency,
limits the bandwidth, and counts. Objects are also served by plain HTTP, without a signature.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.parts.penstock_remote import Endpoint as Server
from tests.parts.penstock_remote import serve_s3

__all__ = ["LATENCY", "RATE", "Counts", "Endpoint", "serve"]

LATENCY, RATE = 0.020, 150e6  # seconds of a request, bytes per second of all


@dataclass(frozen=True, slots=True)
class Counts:
    """What the endpoint has served."""

    requests: int
    n_bytes: int
    most_in_flight: int
    cpu_seconds: float
    """Of the proxy, since it was started."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is; picklable, for contenders in other processes."""

    server: Server

    @property
    def http(self) -> str:
        """The address of the server."""
        return self.server.address

    def limit(self, latency: float = LATENCY, rate: float = RATE) -> None:
        """Set seconds per request and bytes per second (0: as fast as it goes), and count from zero."""
        self.server.set_line(latency_seconds=latency, bytes_per_second=rate, direct=True)
        self.server.reset_counts()

    def counts(self) -> Counts:
        """Return what has been served since the limits were set."""
        spent = psutil.Process(self.server.server_id).cpu_times()
        return Counts(
            sum(self.server.n_requests(method) for method in ("GET", "HEAD")),
            self.server.n_bytes(),
            self.server.most_in_flight(),
            spent.user + spent.system,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients of S3 find the server, without TLS."""
        return {
            **self.server.environment,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "S3_ENDPOINT_URL": self.http,
        }


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Endpoint]:
    """Serve `folder/bucket` as `s3://bucket`, without limits at first."""
    with serve_s3(folder) as server:
        yield Endpoint(server)
