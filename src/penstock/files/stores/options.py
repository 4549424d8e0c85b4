"""How a store at a URL is reached."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.files.stores.url import Url, is_url

__all__ = ["StoreOptions", "stall_seconds"]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store at a URL is reached; what is not given comes from the environment and the usual config files.

    Parameters
    ----------
    endpoint
        Address of the server, for S3-compatible stores, Google and Azure: `"http://localhost:9000"`.
    region
        Region of an S3 bucket.
    anonymous
        Send no credentials, as public buckets allow.
    credentials
        A function that returns credentials; it is called again when they expire. For S3, a mapping with
        `access_key_id`, `secret_access_key` and, if there is one, `token`; for Google `token`; for Azure `token`,
        `access_key` or `sas_token`; for HTTP, the headers `Authorization` or `Cookie`. Worker processes that are
        spawned need one that can be pickled.
    retries
        How often a request that fails is repeated.
    deadline_seconds
        How long it is repeated. No request leaves the caller without an answer or an error for longer than this.
    connections
        Requests in flight at a time, for each process, at most: all of them if each is small, a quarter if they are
        large.
    """

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    credentials: Callable[[], Mapping[str, Any]] | None = field(default=None, repr=False)
    retries: int = 10
    deadline_seconds: float = 120.0
    connections: int = 64

    def __post_init__(self) -> None:
        if self.endpoint is not None and not (is_url(self.endpoint) and Url(self.endpoint).is_http):
            raise OptionError(f"endpoint must begin with http:// or https://, got {self.endpoint!r}.")
        if self.credentials is not None and not callable(self.credentials):
            raise OptionError(
                "credentials must be a function that returns a mapping, such as lambda: {'access_key_id': ..., "
                f"'secret_access_key': ...}}, got a {type(self.credentials).__name__}."
            )
        if self.credentials is not None and self.anonymous:
            raise OptionError("credentials and anonymous=True exclude each other; leave one of them out.")
        check_integer("retries", self.retries, at_least=0)
        check_integer("connections", self.connections, at_least=1)
        seconds = self.deadline_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds < float("inf"):
            raise OptionError(f"deadline_seconds must be a number > 0, got {seconds!r}.")


def stall_seconds(options: StoreOptions) -> float:
    """Return how long a server may be silent within a request: short enough for several attempts."""
    return min(30.0, options.deadline_seconds / 4)
