"""What the shards of a write hold: their layout, and how much of them is data."""

import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.files.stores.url import Url
from penstock.shard.columns.read_index import ShardIndex, layout_of, payload_bytes
from penstock.shard.manifest import ShardEntry
from penstock.shard.side_index import SideIndex

__all__ = ["ShardContents"]

_LOG = logging.getLogger("penstock")
_MUCH_LARGER, _WORTH_A_WORD = 2, 1 << 26  # times the data; bytes


class ShardContents:
    """Adds up what finished shards hold."""

    def __init__(self) -> None:
        self._layouts: set[str] = set()
        self._payload = 0

    @property
    def layout(self) -> str:
        """The layout of the shards; several are joined by `+`."""
        return "+".join(sorted(self._layouts)) or "samples"

    def add(self, side_index: ShardIndex) -> None:
        """Add a shard."""
        self._layouts.add(layout_of(side_index))
        if isinstance(side_index, SideIndex):
            self._payload += payload_bytes(side_index)

    def suggest_columns(self, where: Path | Url, shards: Sequence[ShardEntry]) -> None:
        """Log that the layout "columns" would be much smaller, if it would."""
        n_bytes = sum(shard.tar_bytes for shard in shards)
        if self.layout == "samples" and n_bytes > max(_WORTH_A_WORD, _MUCH_LARGER * self._payload):
            _LOG.warning(
                "%s takes %.0f MB for %.0f MB of data: each small sample has headers and padding. layout='columns' "
                "stores the same samples in about %.0f MB; the webdataset library reads it as blocks, not as samples.",
                where,
                n_bytes / 1e6,
                self._payload / 1e6,
                1.05 * self._payload / 1e6,
            )
