"""A lock on the objects at a URL: one writer at a time, also if the last one died without a word.

A server does not notice that a process has died, as the system does for `files.locks`. So the holder renews its lock
object, and whoever finds one that is not renewed takes it over. The numbers in the names of lock objects only grow: two
that take over at once want the same name, and the server gives it to one of them (put-if-absent).
"""

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError, ReadError, WriteError
from penstock.files.regular import read_regular
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.protocol import Store

__all__ = ["EXPIRY_SECONDS", "Lease"]

EXPIRY_SECONDS = 60.0
"""A lock object that is not renewed for this long belongs to a writer that has died."""

_RENEWALS = 4  # in the time of expiry: three may fail
_LOOK_SECONDS = 1.0
_NAME = re.compile(r"lock-(\d+)\.json")
_LOG = logging.getLogger("penstock")


class Lease:
    """The lock of one writer on the objects below a URL.

    1. Another writer holds it and lives: WriteError. One that has died is told apart at once if it ran on this machine,
       by its process; otherwise by watching for `expiry_seconds` whether it renews its lock.
    2. Two writers begin, or take over, at once: one of them holds it, and the other gets WriteError.
    3. The holder could not renew it for `expiry_seconds` (no network, a suspended machine) and another has taken over:
       `check` raises WriteError, before anything else is written.
    4. A forked child has a copy: it neither renews nor releases it.
    """

    def __init__(self, store: Store, folder: str, expiry_seconds: float = EXPIRY_SECONDS) -> None:
        self._store, self._folder, self._expiry = store, folder, expiry_seconds
        self._process, self._owner = os.getpid(), secrets.token_hex(8)
        self._n_renewals, self._number = 0, -1
        self._stop = threading.Event()
        self._number = self._acquire()
        self._renewer = threading.Thread(
            target=self._renew_until_stopped, args=(self._number,), name="penstock-lease", daemon=True
        )
        self._renewer.start()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._number >= 0 and self._process == os.getpid()

    def check(self) -> None:
        """Raise WriteError if another writer has taken over."""
        if time.monotonic() - self._renewed < self._expiry:
            return
        if max(self._list(), default=-1) != self._number:
            raise WriteError(
                f"Another writer has taken over {self._store.url}: this one could not renew its lock for "
                f"{self._expiry:g} s. Wait for the other one, or use another URL."
            )
        self._renew(self._number)

    def release(self) -> None:
        """Release the lock; idempotent. A server that cannot be reached releases it when it expires."""
        if not self.is_held:
            return
        number, self._number = self._number, -1
        self._stop.set()
        self._renewer.join()
        with suppress(PenstockError):
            self._store.remove(self._key(number))

    def _acquire(self) -> int:
        """Return the number of the lock object that this writer has put."""
        found = self._list()
        for number in found:
            if not self._is_dead(number):
                raise self._make_refusal(number)
        number = max(found, default=-1) + 1
        if not self._store.put(self._key(number), self._content(), if_absent=True):
            raise self._make_refusal(number)
        self._renewed = time.monotonic()
        # One that listed the locks before another was released could have put its own beside the next one.
        others = [other for other in self._list() if other not in (number, *found)]
        if others:
            self._store.remove(self._key(number))
            raise self._make_refusal(others[0])
        for dead in found:
            with suppress(ReadError, WriteError):  # the next writer removes it
                self._store.remove(self._key(dead))
        return number

    def _list(self) -> list[int]:
        names = (info.key.rpartition("/")[2] for info in self._store.list_objects(self._folder))
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)) is not None)

    def _is_dead(self, number: int) -> bool:
        holder = self._read(number)
        if holder is None:
            return True
        if (holder.get("machine"), holder.get("processes")) == _identify_machine():
            return _start_of(holder.get("process")) != holder.get("started")
        _LOG.warning(
            "A writer on %s has locked %s. Waiting %g s to see whether it is still at work.",
            holder.get("host"),
            self._store.url,
            self._expiry,
        )
        until, n_missing = time.monotonic() + self._expiry, 0
        while time.monotonic() < until and n_missing < 3:  # some servers have none for a moment while it is replaced
            time.sleep(min(_LOOK_SECONDS, self._expiry / 20))
            now = self._read(number)
            n_missing = n_missing + 1 if now is None else 0
            if now not in (None, holder):
                return False
        return True

    def _read(self, number: int) -> dict[str, Any] | None:
        """Return what the holder of a lock says about itself; None if it has been released."""
        try:
            found = json.loads(self._store.read_object(self._key(number))[0])
        except MissingObjectError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _renew_until_stopped(self, number: int) -> None:
        while not self._stop.wait(self._expiry / _RENEWALS):
            try:
                if max(self._list(), default=-1) == number:
                    self._renew(number)
            except Exception as error:  # the next one may succeed, and `check` raises if none does
                _LOG.warning("The lock of %s could not be renewed: %s", self._store.url, error)

    def _renew(self, number: int) -> None:
        began = time.monotonic()
        self._n_renewals += 1
        self._store.put(self._key(number), self._content())
        self._renewed = began

    def _key(self, number: int) -> str:
        return f"{self._folder}/lock-{number}.json"

    def _content(self) -> bytes:
        machine, processes = _identify_machine()
        about = {
            "owner": self._owner,
            "host": socket.gethostname(),
            "machine": machine,
            "processes": processes,
            "process": self._process,
            "started": _start_of(self._process),
            "renewals": self._n_renewals,
            "time": time.time(),
        }
        return json.dumps(about, indent=1).encode()

    def _make_refusal(self, number: int) -> WriteError:
        holder = self._read(number) or {}
        who = f" (process {holder['process']} on {holder['host']})" if {"process", "host"} <= holder.keys() else ""
        return WriteError(
            f"Another writer is at work in {self._store.url}{who}. Wait for it, or use another URL. If it has died, "
            f"its lock expires after {self._expiry:g} s."
        )


def _identify_machine() -> tuple[str, str]:
    """Return what is the same only for processes that see each other: the boot of a machine, and its process ids."""
    try:
        boot = read_regular("/proc/sys/kernel/random/boot_id").decode().strip()
        return boot, os.readlink("/proc/self/ns/pid")  # noqa: PTH115  # no path: `pid:[4026531836]`
    except OSError:
        return secrets.token_hex(8), ""  # like no other


def _start_of(process: Any) -> int | None:
    """Return when a process of this machine started, in ticks; None if there is none. Ids are used again."""
    try:
        return int(read_regular(Path(f"/proc/{int(process)}/stat")).rpartition(b")")[2].split()[19])
    except (OSError, ValueError, TypeError, IndexError):
        return None
