"""How much memory one stored item may expand to: the one limit of all decoders and readers.

A few stored bytes can ask for any amount of memory: compressed zeros, a sound that is resampled, a shape in a header.
What is larger than 256 MiB and more than 100 times as large as what is stored is refused before the memory is taken.
The environment variable sets the 256 MiB: worker processes inherit it, however they start.
"""

import os

from penstock.core.errors import OptionError, PenstockError, SourceError

__all__ = ["MAX_AXES", "MAX_DEPTH", "check_expansion", "expansion_reason", "max_item_bytes"]

MAX_DEPTH = 100
"""How deep values may be nested. Whoever copies, compares or sends them calls itself once for each level."""

MAX_AXES = 63
"""Axes of an array; a batch has one more, and NumPy at most 64."""

_VARIABLE = "PENSTOCK_MAX_ITEM_BYTES"
_DEFAULT_BYTES = 256 << 20
_MAX_RATIO = 100  # measurements shrink by a factor of ten at the very best, bombs by a thousand or a million


def max_item_bytes(stored_bytes: int) -> int:
    """Return how many bytes an item that is stored in `stored_bytes` bytes may expand to.

    Raises
    ------
    OptionError
        The environment variable PENSTOCK_MAX_ITEM_BYTES is set, but not to an integer >= 1.
    """
    text = os.environ.get(_VARIABLE)
    if text is None:
        return max(_DEFAULT_BYTES, _MAX_RATIO * stored_bytes)
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 18 or not int(text):
        raise OptionError(
            f"The environment variable {_VARIABLE} must be an integer >= 1 (a number of bytes), got {text[:40]!r}."
        )
    return max(int(text), _MAX_RATIO * stored_bytes)


def expansion_reason(what: str, n_bytes: int | None, stored_bytes: int) -> str:
    """Return the message about something that expands to more than the limit; `n_bytes` None: to how much is unknown.

    Examples
    --------
    >>> print(expansion_reason("it", 10**9, 1000))
    it would take 1,000,000,000 bytes of memory, but may take at most 268,435,456, since 1,000 bytes of it are stored; \
if it is valid, set the environment variable PENSTOCK_MAX_ITEM_BYTES to the number of bytes to allow
    """
    limit = max_item_bytes(stored_bytes)
    size = f"more than {limit:,}" if n_bytes is None else f"{n_bytes:,}"
    return (
        f"{what} would take {size} bytes of memory, but may take at most {limit:,}, since {stored_bytes:,} bytes of it "
        f"are stored; if it is valid, set the environment variable {_VARIABLE} to the number of bytes to allow"
    )


def check_expansion(
    what: str, n_bytes: int, stored_bytes: int, *, error: type[PenstockError | ValueError] = SourceError
) -> None:
    """Raise `error` if `what`, stored in `stored_bytes` bytes, would expand to `n_bytes`, which is over the limit.

    Examples
    --------
    >>> check_expansion("a.wav", n_bytes=7_000_000, stored_bytes=300)
    """
    if n_bytes > max_item_bytes(stored_bytes):
        end = "." if issubclass(error, PenstockError) else ""  # decoders raise a reason, not a sentence
        raise error(expansion_reason(what, n_bytes, stored_bytes) + end)
