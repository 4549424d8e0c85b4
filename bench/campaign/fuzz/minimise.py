"""Makes an input that fails as small as it goes: a corpus file should show what matters and nothing else."""

import time
from collections.abc import Callable

__all__ = ["minimise"]


_SECONDS = 5.0


def minimise(content: bytes, fails: Callable[[bytes], bool], attempts: int = 400) -> bytes:
    """Return a part of an input that still fails: delta debugging, from halves down to single bytes.

    Then bytes are replaced by zeros or spaces, from the first to the last, as far as attempts and time suffice.
    """
    until = time.monotonic() + _SECONDS
    size = len(content) // 2
    while size and attempts and time.monotonic() < until:
        at, shrunk = 0, False
        while at < len(content) and attempts and time.monotonic() < until:
            shorter = content[:at] + content[at + size :]
            attempts -= 1
            if fails(shorter):
                content, shrunk = shorter, True
            else:
                at += size
        if not shrunk or size > len(content) // 2:
            size //= 2
    plain = b" " if content.isascii() else b"\0"
    for at in range(len(content)):
        if not attempts or time.monotonic() > until:
            break
        if content[at : at + 1] == plain or chr(content[at]).isspace():
            continue
        attempts -= 1
        simpler = content[:at] + plain + content[at + 1 :]
        if fails(simpler):
            content = simpler
    return content
