"""URLs of folders and objects, kept apart from paths of this machine."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from penstock.core.errors import OptionError

__all__ = ["Url", "is_url", "parse_place"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # with one slash, too: Path("s3://bucket") has no more
_HOST = re.compile(r"(\[[^]]*\]|[^:]*)(:[0-9]+)?")
_QUERY = re.compile(r"\?[^/?=]+=")  # not the `?` of a pattern
_HUB = re.compile(r"hf:/+(?:(datasets|spaces)/)?([^/@]+/[^/@]+)(?:@([^/]+))?/*(.*)", re.IGNORECASE | re.DOTALL)
_SAFE = "/~!$&'()*+,;=:@"
"""Characters that a path of an http URL has as they are."""


@dataclass(frozen=True, order=True, slots=True)
class Url:
    """The URL of a folder or an object, without a slash at the end.

    Parts are appended with `/`, as to a `Path`. An http URL holds its path as browsers do (`%20`); `name` and what is
    appended are plain names. What `hf://` names is at an https URL, which this then is.

    Examples
    --------
    >>> shards = Url("s3://bucket/train/")
    >>> str(shards / "shard_000000.tar"), shards.name, shards.parent
    ('s3://bucket/train/shard_000000.tar', 'train', Url('s3://bucket'))
    >>> print(Url("hf://datasets/owner/name@v1/data/a.zarr"))
    https://huggingface.co/datasets/owner/name/resolve/v1/data/a.zarr
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _resolve_hub(self.text))
        found = _URL.match(self.text)
        if found is None:
            raise OptionError(f"A URL must be SCHEME://PLACE, got {self.text!r}.")
        scheme = found[1].lower()
        rest = self.text[found.end() :].lstrip("/")
        text = f"{scheme}://{'/' if scheme == 'file' else ''}{rest}".rstrip("/")
        # `/` alone is the root of a file system, and a scheme without a host has nothing else.
        object.__setattr__(self, "text", text + "//" * text.endswith(":") + "/" * (text == "file:"))
        self._check()

    def _check(self) -> None:
        host = self.text[len(self.root.partition("://")[0]) + 3 :].partition("/")[0]
        if not host and self.scheme != "file":
            raise OptionError(f"A URL must name a bucket or a server, got {self.text!r}.")
        user, at, _ = host.rpartition("@")
        if at and (":" in user or self.is_http):
            raise OptionError(
                f"A URL must hold no password, because URLs appear in messages, got one for "
                f"{self.scheme}://{host.rpartition('@')[2]}. Pass it with StoreOptions(credentials=...)."
            )
        if not _HOST.fullmatch(host.rpartition("@")[2]):  # not quoted: a password may have a slash
            raise OptionError(
                f"A URL must be SCHEME://HOST:PORT/PATH, got another port than a number ({self.scheme}://)."
            )
        if _QUERY.search(self.text) or (self.is_http and ("?" in self.text or "#" in self.text)):
            shown = re.split(r"[?#]", self.text)[0]
            raise OptionError(
                f"A URL must have no query (what follows `?`): it may be a credential, and URLs appear in messages, "
                f"got one after {shown!r}. Read from the store itself, or download the file."
            )
        if any(part in ("", ".", "..") for part in self.path.split("/") if self.path):
            raise OptionError(f"The parts of a URL must be names, none of them empty, `.` or `..`, got {self.text!r}.")

    @property
    def scheme(self) -> str:
        """What comes before `://`, in lower case."""
        return self.text.partition(":")[0]

    @property
    def is_http(self) -> bool:
        """Whether this is the address of a web server."""
        return self.scheme in ("http", "https")

    @property
    def root(self) -> str:
        """Scheme and bucket, or scheme and server."""
        scheme, _, rest = self.text.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    @property
    def path(self) -> str:
        """What follows the bucket or the server, as a plain name without a slash at its beginning."""
        path = self.text[len(self.root) :].removeprefix("/")
        return unquote(path) if self.is_http else path

    @property
    def name(self) -> str:
        """The last part of the path; empty for a bucket or a server."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """The folder that this lies in; that of a bucket is the bucket."""
        if not self.path:
            return self
        return Url(self.text.rpartition("/")[0] if "/" in self.path else self.root)

    def with_name(self, name: str) -> "Url":
        """Return the URL of `name` in the same folder."""
        return self.parent / name

    def __truediv__(self, name: str) -> "Url":
        if not name:
            return self
        between = "" if self.text.endswith("/") else "/"
        return Url(f"{self.text}{between}{quote(name, safe=_SAFE) if self.is_http else name}")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Url({self.text!r})"


def _resolve_hub(text: str) -> str:
    """Return the https URL of what is on the Hugging Face Hub: `hf://datasets/OWNER/NAME@REVISION/PATH`."""
    if text[:4].lower() != "hf:/":
        return text
    found = _HUB.fullmatch(text)
    if found is None:
        raise OptionError(f"A URL on the Hugging Face Hub must be hf://datasets/OWNER/NAME/PATH, got {text!r}.")
    kind, name, revision, path = found.groups()
    folder = f"{kind.lower()}/{name}" if kind else name
    return f"https://huggingface.co/{folder}/resolve/{revision or 'main'}/{quote(path, safe=_SAFE)}"


def is_url(where: object) -> bool:
    """Return whether `where` is a URL: `"s3://bucket/x"`, or `Path("s3:/bucket/x")`, which is what Path makes of it."""
    if isinstance(where, Url):
        return True
    return isinstance(where, str | os.PathLike) and _URL.match(str(os.fspath(where))) is not None


def parse_place(where: "str | os.PathLike[str] | Url") -> Path | Url:
    """Return a Url, or the absolute path of a file or folder of this machine."""
    if isinstance(where, Url):
        return where
    return Url(os.fspath(where)) if is_url(where) else Path(where).absolute()
