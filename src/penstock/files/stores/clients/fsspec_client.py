"""Requests by fsspec, for schemes that obstore does not know."""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import quote

from penstock.core.errors import MissingDependency, OptionError
from penstock.files.stores.clients.obstore_client import OBSTORE_SCHEMES
from penstock.files.stores.errors import RequestError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import ClientUpload, ObjectInfo

__all__ = ["FsspecClient"]

_T = TypeVar("_T")
_VERSION_KEYS = ("ETag", "etag", "content_md5", "mtime", "LastModified", "last_modified", "modified", "created")
"""What file systems call the version or the time of the last change; the first that is there counts."""


class FsspecClient:
    """Requests by a file system of fsspec, each in a thread of its own that is given up if it takes too long."""

    def __init__(self, root: str, options: StoreOptions, credentials: Mapping[str, Any] | None) -> None:
        self._root, self._deadline = root, options.deadline_seconds
        try:
            core: Any = import_module("fsspec.core")
        except ImportError as error:
            raise MissingDependency("fsspec", "remote", f"Reading {root}") from error
        given = _file_system_options(root.partition(":")[0], options, credentials)
        try:
            # Not one that a parent process may have opened: file systems with a thread are not fork-safe.
            self.file_system, base = core.url_to_fs(f"{root}/", skip_instance_cache=True, **given)
        except ImportError as error:
            if root.partition(":")[0] in OBSTORE_SCHEMES:
                raise MissingDependency("obstore", "remote", f"Reading {root}") from error
            raise OptionError(f"Could not open {root}: {error}") from error
        except Exception as error:  # for example an unknown scheme
            raise OptionError(f"Could not open {root}: {error}") from error
        self._base = base.rstrip("/")

    def describe(self, path: str, seconds: float) -> ObjectInfo:
        """Return size and version of an object."""
        found = self._call(seconds, self.file_system.info, self._full(path))
        if found.get("type") == "directory":
            raise RequestError("missing", "there is no such object")
        return _info(path, found)

    def read_range(self, path: str, begin: int, n_bytes: int, version: str | None, seconds: float) -> memoryview:
        """Return so many bytes from `begin` on."""
        self._check_version(path, version, seconds)
        end = begin + n_bytes
        content = self._call(seconds, lambda: self.file_system.cat_file(self._full(path), start=begin, end=end))
        if len(content) < n_bytes and 0 <= (found := self.describe(path, seconds).n_bytes) < end:
            raise RequestError("refused", f"it ends after {found:,} bytes")
        if len(content) != n_bytes:
            raise RequestError("again", f"{len(content):,} bytes came instead of {n_bytes:,}")
        return memoryview(content)

    def read_object(self, path: str, version: str | None, seconds: float) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        info = self._check_version(path, version, seconds) or self.describe(path, seconds)
        content = bytes(self._call(seconds, self.file_system.cat_file, self._full(path)))
        if info.n_bytes not in (-1, len(content)):
            raise RequestError("again", f"{len(content):,} bytes came instead of {info.n_bytes:,}")
        return content, info._replace(n_bytes=len(content))

    def list_objects(self, prefix: str, after: str | None, seconds: float) -> Iterator[list[ObjectInfo]]:
        """Yield the objects below a folder, all at once."""
        found = self._call(seconds, lambda: self.file_system.find(self._full(prefix), detail=True))
        infos = [_info(self._relative(name), info) for name, info in found.items()]
        yield [info for info in sorted(infos) if after is None or info.key > after]

    def list_folders(self, prefix: str, seconds: float) -> list[str]:
        """Return the names of the folders in a folder."""
        found = self._call(seconds, lambda: self.file_system.ls(self._full(prefix), detail=True, refresh=True))
        folders = (info["name"] for info in found if info["type"] == "directory")
        return [name.rstrip("/").rpartition("/")[2] for name in folders]

    def put(self, path: str, content: bytes | memoryview, if_absent: bool, seconds: float) -> bool:
        """Write an object; return False if it was there and `if_absent`."""
        full = self._full(path)
        mode = "create" if if_absent else "overwrite"
        self._make_folder(full, seconds)
        try:
            self._call(seconds, lambda: self.file_system.pipe_file(full, bytes(content), mode=mode))
        except RequestError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def open_upload(self, path: str) -> ClientUpload:
        """Begin to write a large object."""
        full = self._full(path)
        folder, _, name = full.rpartition("/")
        aside = f"{folder}/.{name}.{secrets.token_hex(8)}.part"
        self._make_folder(full, self._deadline)
        return _FsspecUpload(self, (aside, full), self._call(self._deadline, self.file_system.open, aside, "wb"))

    def remove(self, path: str, seconds: float) -> None:
        """Remove an object."""
        self._call(seconds, self.file_system.rm_file, self._full(path))

    def close(self) -> None:
        """Leave the connections to the file system, which closes them when it is not used."""

    def _full(self, path: str) -> str:
        if self._root.startswith("http"):
            path = quote(path)
        return f"{self._base}/{path}" if path else self._base

    def _relative(self, full: str) -> str:
        return full.removeprefix(self._base).lstrip("/")

    def _make_folder(self, full: str, seconds: float) -> None:
        folder = full.rpartition("/")[0]
        if folder and folder != self._base:
            self._call(seconds, lambda: self.file_system.makedirs(folder, exist_ok=True))

    def _check_version(self, path: str, version: str | None, seconds: float) -> ObjectInfo | None:
        if version is None:
            return None
        info = self.describe(path, seconds)
        if info.version != version:
            raise RequestError("replaced", f"it was replaced: version {version} then, {info.version} now")
        return info

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Return what a function of the file system returns; for uploads."""
        return self._call(self._deadline, function, *args)

    def _call(self, seconds: float, function: Callable[..., _T], *args: Any) -> _T:
        """Return what a function returns; give up if it takes longer than half of the deadline."""
        results: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(function(*args))
            except Exception as error:  # file systems may raise anything
                errors.append(error)

        thread = threading.Thread(target=run, name="penstock-fsspec", daemon=True)
        thread.start()
        thread.join(min(seconds, self._deadline / 2))
        if results:
            return results[0]
        if not errors:
            raise RequestError("again", "the server did not answer in time")
        raise _explain(errors[0]) from errors[0]


class _FsspecUpload:
    """An upload into a file beside the one that it becomes when it is finished."""

    def __init__(self, client: "FsspecClient", paths: tuple[str, str], file: Any) -> None:
        self._client, self._file = client, file
        self._aside, self._path = paths
        self._has_ended = False

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self._client.call(self._file.write, content)

    def finish(self) -> None:
        """Publish the object."""
        self._client.call(self._file.close)
        self._client.call(self._client.file_system.mv, self._aside, self._path)
        self._has_ended = True

    def abort(self) -> None:
        """Discard what was sent."""
        if not self._has_ended:
            self._has_ended = True
            self._client.call(self._file.close)
            self._client.call(self._client.file_system.rm_file, self._aside)


def _file_system_options(scheme: str, options: StoreOptions, credentials: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a file system; those of s3fs have names of their own."""
    if scheme in ("s3", "s3a"):
        names = {"access_key_id": "key", "secret_access_key": "secret"}
        given = {names.get(name, name): value for name, value in (credentials or {}).items() if name != "expires_at"}
        client = {"endpoint_url": options.endpoint, "region_name": options.region}
        chosen = {name: value for name, value in client.items() if value is not None}
        return {**given, "client_kwargs": chosen, **({"anon": True} if options.anonymous else {})}
    if options.endpoint is not None or options.region is not None or options.anonymous:
        raise OptionError(
            f"endpoint, region and anonymous are no options of {scheme}:// URLs, which fsspec reads. Return what its "
            "file system needs from credentials."
        )
    if scheme in ("http", "https"):
        return {"headers": dict(credentials)} if credentials else {}
    return dict(credentials or {})


def _info(path: str, found: Mapping[str, Any]) -> ObjectInfo:
    tag = next((found[name] for name in _VERSION_KEYS if found.get(name)), None)
    # Some file systems give the time of a change as a number in lists and as a datetime otherwise.
    version = None if tag is None else str(tag.timestamp() if isinstance(tag, datetime) else tag).strip('"')
    size = found.get("size")
    return ObjectInfo(path, -1 if size is None else int(size), version)


def _explain(error: Exception) -> RequestError:
    """Return what an error of a file system means."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0][:200].rstrip(": .")
    if isinstance(error, FileNotFoundError):
        reason = error.__cause__  # fsspec says so of every HTTP request that fails
        is_http = isinstance(reason, Exception) and type(reason).__module__.startswith(("aiohttp", "asyncio"))
        if isinstance(reason, Exception) and is_http and getattr(reason, "status", None) != 404:
            return _explain(reason)
        return RequestError("missing", "there is no such object")
    status = getattr(error, "status", None)
    if isinstance(status, int):
        again = status in (408, 425) or (status >= 500 and status != 501)
        return RequestError("slow" if status in (429, 503) else "again" if again else "refused", said)
    if isinstance(error, PermissionError | FileExistsError | IsADirectoryError | NotADirectoryError):
        return RequestError("refused", said)
    if isinstance(error, OSError | TimeoutError) or type(error).__module__.startswith("aiohttp"):
        return RequestError("again", said)
    return RequestError("refused", said)
