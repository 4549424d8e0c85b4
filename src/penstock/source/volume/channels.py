"""The channels of a read: which chunks their patches need, in groups that fit into memory, and how they are filled."""

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from penstock.source.volume.array import ResolvedArray
from penstock.source.volume.patch import Coordinates, Placement, StoredVolume, fill_patch, find_overlaps

__all__ = ["Channel", "ChunkKey", "PatchGroup", "group_patches"]

ChunkKey = tuple[int, Coordinates]
"""The number of a volume, and the coordinates of a chunk."""


class Channel:
    """One channel of one array, for all patches of a read."""

    def __init__(
        self, array: ResolvedArray, number: int, volume_number: int, volume: StoredVolume, placement: Placement
    ) -> None:
        self.array, self.number, self.placement = array, number, placement
        self.volume_number, self.volume = volume_number, volume
        self._item_bytes = volume.array.dtype.itemsize

    def chunks(self, row: int) -> list[ChunkKey]:
        """Return the chunks that a patch needs."""
        found = find_overlaps(self.volume.chunk, self.placement.low[row], self.placement.high[row])
        return [(self.volume_number, coordinates) for coordinates, _, _ in found]

    def stored_bytes(self, row: int) -> int:
        """Return the size of the stored voxels under a patch."""
        return self.placement.n_voxels(row) * self._item_bytes

    def fill(self, row: int, chunks: Mapping[Coordinates, NDArray[Any]], out: NDArray[Any]) -> int:
        """Assemble a patch; return 0."""
        if not self.placement.whole[row]:
            out[...] = self.array.spec.pad_value
        fill_patch(self.volume, chunks, self.placement, row, out if out.ndim == 3 else out[None])
        return 0


class PatchGroup:
    """Consecutive patches [begin, end), whose chunks are held in memory at once."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.chunks: dict[ChunkKey, int] = {}
        """Size of each chunk."""

        self.uses: list[int] = []
        """Number of chunks that each patch needs."""

    def add(self, keys: list[ChunkKey], fresh: dict[ChunkKey, int]) -> None:
        """Add the next patch, which needs the chunks `keys`; those in `fresh` no patch before it needs."""
        self.chunks |= fresh
        self.uses.append(len(keys))
        self.end += 1


def group_patches(
    channels: list[Channel], volumes: tuple[StoredVolume, ...], n_patches: int, budget: int
) -> Iterator[PatchGroup]:
    """Yield all patches in groups whose chunks fit the budget; a patch that exceeds it alone begins a group."""
    group, n_bytes = PatchGroup(0), 0
    for row in range(n_patches):
        keys = [key for channel in channels for key in channel.chunks(row)]
        fresh = {key: volumes[key[0]].chunk_bytes(key[1]) for key in keys if key not in group.chunks}
        if group.uses and fresh and n_bytes + sum(fresh.values()) > budget:
            yield group
            group, n_bytes = PatchGroup(row), 0
            fresh = {key: volumes[key[0]].chunk_bytes(key[1]) for key in keys}
        group.add(keys, fresh)
        n_bytes += sum(fresh.values())
    yield group
