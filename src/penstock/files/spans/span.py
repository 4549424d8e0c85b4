"""Names of bytes in remote objects."""

from typing import NamedTuple

import xxhash

__all__ = ["WHOLE", "Span", "StoredSpan"]

WHOLE = -1
"""As the end of a span: the end of the object, whatever its size."""


class Span(NamedTuple):
    """Bytes of an object; fetched, kept and evicted as a whole."""

    key: str
    """Name of the object, relative to its folder."""

    begin: int
    end: int
    """`WHOLE`: the end of the object."""

    is_kept: bool | None = None
    """Whether a cache folder keeps it, if there is room; None: if it is among those that fit."""

    @property
    def n_bytes(self) -> int:
        """Size; 0 if it is not known before the object was read."""
        return max(0, self.end - self.begin)


class StoredSpan(NamedTuple):
    """A span of one version of an object, as a cache folder names it."""

    object: str
    """Digest of the object's URL and version."""

    begin: int
    end: int

    @classmethod
    def of(cls, url: str, version: str, span: Span) -> "StoredSpan":
        """Return the name of a span of the object at a URL."""
        digest = xxhash.xxh3_128_hexdigest(f"{url}\0{version}".encode("utf-8", "surrogatepass"))
        return cls(digest, span.begin, span.end)

    @property
    def file_name(self) -> str:
        """Name of its file in the folder of its object."""
        return f"{self.begin}-{'end' if self.end == WHOLE else self.end}"
