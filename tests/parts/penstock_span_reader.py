"""Reads spans in a process of its own, also in one that is spawned."""

from collections.abc import Sequence
from typing import Any

from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.span import Span

__all__ = ["read_spans"]


def read_spans(folder: RemoteFolder, spans: Sequence[Span], barrier: Any, results: Any) -> None:
    """Wait for the others; read all spans; put their bytes, and how many were downloaded, into a queue."""
    barrier.wait()
    content = b"".join(each.tobytes() for each in folder.get(spans))
    results.put((content, folder.transfers.n_bytes))
    folder.close()
