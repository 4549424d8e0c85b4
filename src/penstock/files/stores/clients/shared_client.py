"""One client per process for each bucket or server, with its credentials.

obstore's threads do not survive a fork: a request of the child would wait for ever. So whatever was opened here belongs
to one process. A forked child of a process that has loaded obstore sends its requests through a client process.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from penstock.core.errors import OptionError, PenstockError
from penstock.files.stores.clients.obstore_client import OBSTORE_SCHEMES, ObstoreClient, ObstoreSettings
from penstock.files.stores.clients.process_client import ProcessClient
from penstock.files.stores.clients.settings import find_provider, obstore_config
from penstock.files.stores.errors import RequestError
from penstock.files.stores.options import StoreOptions

__all__ = ["Client", "SharedClient", "find_client"]

Client = ObstoreClient | ProcessClient
"""One request at a time, without repeating any. Thread-safe; every failure is a RequestError.

Paths are those below the bucket or the server. `seconds` is how long the answer may take.
"""

_T = TypeVar("_T")
_HEADERS = ("authorization", "cookie", "expires_at")  # those that are not sent to a server that is redirected to
_RENEW_SECONDS = 60.0
"""Credentials that expire within this time are renewed before a request."""


class SharedClient:
    """The client of this process for a bucket or server; opened when it is first used."""

    def __init__(self, root: str, options: StoreOptions) -> None:
        self._root, self._options = root, options
        self._scheme = root.partition(":")[0]
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._credentials: Mapping[str, Any] | None = None
        self._slots = threading.BoundedSemaphore(options.connections)

    def get(self) -> Client:
        """Return the client; with new credentials if those it has are about to expire."""
        client = self._client
        if client is not None and not self._is_expiring():
            return client
        with self._lock:
            if self._client is None or self._is_expiring():
                self._replace()
            assert self._client is not None
            return self._client

    def run(self, request: Callable[[Client, float], _T], client: Client, seconds: float) -> _T:
        """Return what a request does within `seconds`; wait if as many are under way as there may be."""
        begin = time.monotonic()
        if not self._slots.acquire(timeout=max(0.0, seconds)):
            raise RequestError("again", f"all {self._options.connections} connections were in use")
        try:
            return request(client, seconds - (time.monotonic() - begin))
        finally:
            self._slots.release()

    def renew(self, failed: Client) -> bool:
        """Get new credentials, unless another thread just has; return False if there is nobody to ask."""
        with self._lock:
            if self._client is failed:
                if find_provider(self._scheme, self._options) is None:
                    return False
                self._replace()
            return True

    def _replace(self) -> None:
        old, self._client = self._client, self._open()
        if old is not None:
            old.close()

    def close(self) -> None:
        """Close the client; the next request opens another."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def forget(self) -> None:
        """Leave what a forked child has inherited.

        A client of obstore is kept for ever: releasing it waits for locks that threads of the parent may have held.
        """
        if isinstance(self._client, ProcessClient):
            self._client.forget()
        elif isinstance(self._client, ObstoreClient):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))  # also when the interpreter ends

    def _is_expiring(self) -> bool:
        expires = (self._credentials or {}).get("expires_at")
        return isinstance(expires, datetime) and expires.timestamp() - time.time() < _RENEW_SECONDS

    def _open(self) -> Client:
        if self._scheme not in OBSTORE_SCHEMES:
            raise OptionError(
                f"Could not open {self._root}: its scheme must be one of {', '.join(OBSTORE_SCHEMES)} and hf, got "
                f"{self._scheme}. Copy the data to this machine, or mount it."
            )
        self._credentials = self._ask()
        options = replace(self._options, credentials=None)
        config = obstore_config(self._scheme, self._options, self._credentials)
        credentials = None if self._scheme in ("http", "https") else self._credentials
        settings = ObstoreSettings(self._root, config, credentials)
        return ProcessClient(settings, options) if _is_forked else ObstoreClient(settings, options)

    def _ask(self) -> Mapping[str, Any] | None:
        provider = find_provider(self._scheme, self._options)
        if provider is None:
            return None
        try:
            given = provider()
        except PenstockError:
            raise
        except Exception as error:  # a function of the user
            raise OptionError(
                f"The credentials of {self._root} could not be got: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(given, Mapping):
            raise OptionError(
                f"credentials must return a mapping, such as {{'access_key_id': ..., 'secret_access_key': ...}}, got a "
                f"{type(given).__name__}."
            )
        others = [str(name) for name in given if str(name).lower() not in _HEADERS]
        if others and self._scheme in ("http", "https"):
            raise OptionError(
                f"credentials of {self._scheme}:// URLs must be the headers Authorization or Cookie, got {others[0]}: "
                f"if {self._root} redirects to another server, any other header is sent there, too. Ask for a token "
                "that the server takes as Authorization, or download the files first."
            )
        return dict(given)


_lock = threading.Lock()
_clients: dict[tuple[str, StoreOptions], SharedClient] = {}
_MOST_CLIENTS = 64  # credentials are functions: a new one for each source is a new client
_is_forked = False
"""Whether a process above this one had loaded obstore when it forked."""


def find_client(root: str, options: StoreOptions) -> SharedClient:
    """Return the client of this process for a bucket or server."""
    with _lock:
        found = _clients.get((root, options))
        if found is None:
            found = _clients[root, options] = SharedClient(root, options)
            if len(_clients) > _MOST_CLIENTS:
                _clients.pop(next(iter(_clients))).close()  # the next request opens another
        return found


def _forget_parent() -> None:
    global _lock, _is_forked  # noqa: PLW0603  # a thread of the parent may have held the lock
    _lock = threading.Lock()
    _is_forked = _is_forked or "obstore" in sys.modules
    for shared in _clients.values():
        shared.forget()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_parent)
