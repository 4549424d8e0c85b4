"""Requests by obstore: S3, Google, Azure, HTTP and files."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.core.errors import MissingDependency, OptionError
from penstock.files.regular import check_regular
from penstock.files.stores.clients.failure import explain_failure
from penstock.files.stores.errors import RequestError
from penstock.files.stores.options import StoreOptions, stall_seconds
from penstock.files.stores.protocol import ObjectInfo

__all__ = ["OBSTORE_SCHEMES", "PART_BYTES", "ObstoreClient", "ObstoreSettings"]

OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")

PART_BYTES = 1 << 23
"""Bytes of a part of an upload. S3 takes 10,000 parts of an object, so that this allows 80 GB."""

_PARTS_IN_FLIGHT = 4


class ObstoreSettings:
    """What obstore needs to know to reach a bucket or a server; picklable."""

    def __init__(self, root: str, config: Mapping[str, Any], credentials: Mapping[str, Any] | None) -> None:
        self.root, self.config, self.credentials = root, dict(config), credentials


class ObstoreClient:
    """Requests by obstore in this process; its threads do not survive a fork."""

    def __init__(self, settings: ObstoreSettings, options: StoreOptions) -> None:
        try:
            self._obstore: Any = import_module("obstore")
            self._module: Any = import_module("obstore.store")
        except ImportError as error:
            raise MissingDependency("obstore", "remote", f"Reading {settings.root}") from error
        self._settings, self._options = settings, options
        deadline = options.deadline_seconds
        # A request that begins early may take half of the deadline, one that begins late a quarter.
        self._patient = self._open(deadline / 2)
        self._hasty = self._open(stall_seconds(options))
        self._uploading: Any = None

    def _open(self, seconds: float, *, retries: int = 0) -> Any:
        config, options = dict(self._settings.config), self._options
        stall = timedelta(seconds=stall_seconds(options))
        if self._settings.root == "file://":
            return self._module.LocalStore()
        client = {
            **config.pop("client_options", {}),
            "timeout": timedelta(seconds=seconds),
            "read_timeout": stall,
            "connect_timeout": min(stall, timedelta(seconds=10)),
            "pool_max_idle_per_host": str(options.connections),
        }
        if self._settings.credentials is not None:
            given = {"expires_at": None, **self._settings.credentials}
            config["credential_provider"] = lambda: given
        retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=options.deadline_seconds)}
        try:
            return self._module.from_url(self._settings.root, client_options=client, retry_config=retry, **config)
        except Exception as error:  # for example an invalid endpoint
            raise OptionError(f"Could not open {self._settings.root}: {str(error).partition(chr(10))[0]}") from error

    def _for(self, seconds: float) -> Any:
        return self._patient if seconds > self._options.deadline_seconds / 2 else self._hasty

    def _check_kind(self, path: str) -> None:
        """Raise OSError if a path of this machine leads to a FIFO or a device, which would not end."""
        if self._settings.root == "file://":
            check_regular(f"/{path}")

    def describe(self, path: str, seconds: float) -> ObjectInfo:
        """Return size and version of an object."""
        with _explain():
            self._check_kind(path)
            return _info(self._obstore.head(self._for(seconds), path))

    def read_range(self, path: str, begin: int, n_bytes: int, version: str | None, seconds: float) -> memoryview:
        """Return so many bytes from `begin` on, in memory of obstore."""
        end = begin + n_bytes
        with _explain():
            self._check_kind(path)
            answer = self._obstore.get(self._for(seconds), path, options={"range": (begin, end)})
            info = _info(answer.meta)
            _check_version(info, version)
            if info.n_bytes < end:
                raise RequestError("refused", f"it ends after {info.n_bytes:,} bytes")
            content = answer.bytes()
        if len(content) != n_bytes:
            raise RequestError("again", f"{len(content):,} bytes came instead of {n_bytes:,}")
        return memoryview(content)

    def read_object(self, path: str, version: str | None, seconds: float) -> tuple[bytes, ObjectInfo]:
        """Return a whole object.

        It is asked for as a range, because the answer then has its size twice; a server without ranges, and one that
        has none of an empty object, are asked again.
        """
        store = self._for(seconds)
        try:
            return self._read_whole(store, path, version, {"range": {"offset": 0}})
        except RequestError as error:
            if error.failure != "refused" or "range" not in error.reason.lower():
                raise
            return self._read_whole(store, path, version, {})

    def _read_whole(
        self, store: Any, path: str, version: str | None, options: dict[str, Any]
    ) -> tuple[bytes, ObjectInfo]:
        with _explain():
            self._check_kind(path)
            answer = self._obstore.get(store, path, options=options)
            info = _info(answer.meta)
            _check_version(info, version)
            content = bytes(answer.bytes())
        if len(content) != info.n_bytes:
            raise RequestError("again", f"{len(content):,} bytes came instead of {info.n_bytes:,}")
        return content, info

    def list_objects(self, prefix: str, after: str | None, seconds: float) -> Iterator[list[ObjectInfo]]:
        """Yield the objects below a folder in groups."""
        is_empty = after is None
        with _explain():
            groups = self._obstore.list(self._for(seconds), prefix or None, offset=after, chunk_size=1000)
            for group in groups:
                is_empty = False
                yield [_info(meta) for meta in group]
            self._check_listing(is_empty=is_empty)

    def list_folder(self, prefix: str, seconds: float) -> tuple[list[str], list[ObjectInfo]]:
        """Return the names of the folders in a folder, and the objects in it."""
        with _explain():
            found = self._obstore.list_with_delimiter(self._for(seconds), prefix or None)
            self._check_listing(is_empty=not (found["common_prefixes"] or found["objects"]))
        return [name.rpartition("/")[2] for name in found["common_prefixes"]], [
            _info(meta) for meta in found["objects"]
        ]

    def _check_listing(self, *, is_empty: bool) -> None:
        """Raise RequestError for an empty list of a web server: obstore returns one if the server answers 404."""
        if is_empty and self._settings.root.startswith("http"):
            raise RequestError("refused", "the server lists nothing")

    def put(self, path: str, content: bytes | memoryview, if_absent: bool, seconds: float) -> bool:
        """Write an object; return False if it was there and `if_absent`."""
        mode = "create" if if_absent else "overwrite"
        with _explain():
            try:
                self._obstore.put(self._for(seconds), path, content, mode=mode, use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                if not if_absent:
                    raise
                return False
        return True

    def put_file(self, path: str, file: str) -> None:
        """Write the content of a file; obstore itself sends parts that fail again."""
        if self._uploading is None:
            self._uploading = self._open(self._options.deadline_seconds, retries=self._options.retries)
        parts = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": _PARTS_IN_FLIGHT}
        with _explain():
            self._obstore.put(self._uploading, path, Path(file), **parts)

    def remove(self, path: str, seconds: float) -> None:
        """Remove an object."""
        with _explain():
            self._obstore.delete(self._for(seconds), path)

    def close(self) -> None:
        """Leave the connections to obstore, which closes those that are idle."""


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    """Return size and version; an ETag without the quotes that some servers leave out in lists."""
    tag, changed = meta["e_tag"], meta["last_modified"]
    version = re.sub(r'^W/|"', "", tag) if tag else None
    if version is None and isinstance(changed, datetime) and changed.timestamp() > 0:
        version = changed.isoformat()
    return ObjectInfo(meta["path"], meta["size"], version)


def _check_version(info: ObjectInfo, version: str | None) -> None:
    if version is not None and info.version != version:
        raise RequestError("replaced", f"it was replaced: version {version} then, {info.version} now")


@contextmanager
def _explain() -> Iterator[None]:
    """Turn what obstore raises into a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # obstore has types of its own, and raises built-in ones, too
        raise explain_failure(error) from None  # its text is many lines of internals, and may quote a signature
