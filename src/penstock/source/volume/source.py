"""Items from multiscale volumes: patches of several arrays, each with its own shape and scale, around one centre."""

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.cache import SharedCache
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError
from penstock.core.index import Index, join_presence
from penstock.core.types import Block, Field, Span
from penstock.files.stores.options import StoreOptions
from penstock.source.checks import allocate_block, check_items, check_out, check_span, keep_existing, sum_stored
from penstock.source.file_ranges import MAX_FILES, first_distinct
from penstock.source.ranges import Ranges, RemoteUse, join_ranges
from penstock.source.read_pool import ReadPool, Result, map_at_once
from penstock.source.remote_parts import RemoteParts
from penstock.source.select.selectable import Selectable
from penstock.source.stored.folders import Folders
from penstock.source.stored.zarr.record import MissingChunks, check_missing_chunks
from penstock.source.volume.array import ResolvedArray, VolumeArray, resolve_arrays
from penstock.source.volume.centres import find_sampling_region
from penstock.source.volume.grid import compute_taps
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.patch import Coordinates, Placement, StoredVolume, fill_patch, find_overlaps

__all__ = ["VolumeArray", "VolumeSource"]

_PLACED_AT_ONCE = 32  # patches whose chunks are listed before it is asked whether there are enough
_MIN_THREADED_BYTES = 1 << 20  # assembling smaller patches takes less time than starting threads

_ChunkKey = tuple[int, Coordinates]
"""The number of a volume, and the coordinates of a chunk."""


class VolumeSource(Selectable, RemoteParts):
    """Items are patches around the centres of a regular grid, in the region where all volumes overlap.

    The step of the grid is the largest scale among the arrays (see `volume.centres`). Items are numbered tile by tile:
    centres in one stored chunk of the finest level that is read have consecutive numbers, and form a chunk of the
    index. `volume.grid` defines the geometry. Volumes are never written to.

    1. A damaged chunk: DamageError, which names the array and the chunk. A chunk that was there when the source was
       opened and is missing: the same. A chunk that cannot be read: ReadError.
    2. An array whose metadata change, or that is removed, while it is open: ReadError.
    3. A fork at any time is safe: each process has its own cache, counters and threads.

    `prepare` reads the chunk files ahead that patches need and that are not cached, of at most 512 chunks in a call;
    those at a URL are fetched at once, and those of one read also without it. There is no `release`: patches overlap,
    so a chunk belongs to many items, and is hardly ever done with.

    Parameters
    ----------
    arrays
        Field name to the specification of the array.
    axis_order
        Names of the three spatial axes, in the order of shapes, scales and coordinates; volumes may be stored in any
        other order. Arrays with two axes have the last two, and are slices across the first.
    at
        Index on each axis that is not spatial, such as `{"c": 0, "t": 5}`; for channels also a list. All channels if
        not given; other axes that are not named must have length 1. Of several volumes, each is read at the indices on
        its own axes; in a list of volumes, one for each channel, those with one index on an axis have that one.
    pad
        True: all centres in the intersection of all volumes are items, and voxels outside of a volume are `pad_value`.
        False: only centres whose patches, with their margins, lie in their volumes entirely.
    memory_bytes
        Size of the cache of decoded chunks, in each process. The chunks of the patch being assembled come on top.
    margin
        Field name to the number of voxels to read beyond the patch on each side of each axis, which enlarge the field:
        for transforms that rotate the patch and crop it.
    threads
        Chunks decoded at once by all readers of this process. None: one per CPU of this process, and one in a worker
        process, because there are several of those.
    missing_chunks
        What a chunk that is not stored is: None, `"error"` or `"fill"`, as in `ZarrSource`.
    store, cache, cache_bytes
        How volumes at URLs are read, and where what was downloaded is kept; as in `ZarrSource`. A `Multiscale` has its
        own.

    Examples
    --------
    >>> source = VolumeSource({  # doctest: +SKIP
    ...     "raw": VolumeArray("cell.zarr/em", shape=(64, 64, 64), scale=(8, 8, 8)),
    ...     "labels": VolumeArray(["cell.zarr/mito", None], (32, 32, 32), (16, 16, 16), interpolation="nearest"),
    ... })
    >>> source.fields["labels"].shape  # doctest: +SKIP
    (2, 32, 32, 32)
    """

    def __init__(
        self,
        arrays: Mapping[str, VolumeArray],
        *,
        axis_order: Sequence[str] = "zyx",
        at: Mapping[str, int | Sequence[int]] | None = None,
        pad: bool = True,
        memory_bytes: int = 256 * 2**20,
        margin: Mapping[str, Sequence[int]] | None = None,
        threads: int | None = None,
        missing_chunks: MissingChunks = None,
        store: StoreOptions | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        check_missing_chunks(missing_chunks)
        if threads is not None:
            check_integer("threads", threads, at_least=1)
        self.axis_order = tuple(axis_order)
        if len(self.axis_order) != 3 or len(set(self.axis_order)) != 3:
            raise OptionError(f"axis_order must name three different axes, such as 'zyx', got {axis_order!r}.")
        if not isinstance(pad, bool | np.bool_):
            raise OptionError(f"pad must be True or False, got {pad!r}.")
        self._budget, self._threads = check_integer("memory_bytes", memory_bytes, at_least=0), threads
        if cache is None and cache_bytes is not None:
            raise OptionError(
                f"cache_bytes={cache_bytes} needs cache, the folder to keep them in. The memory of decoded chunks is "
                "memory_bytes."
            )
        folders = Folders(store=store, cache=cache, cache_bytes=cache_bytes)
        self._arrays, volumes = resolve_arrays(arrays, self.axis_order, margin or {}, at or {}, folders)
        folders.check_used()
        self._remotes = RemoteUse(volume.array for volume in volumes)
        self._parts = self._remotes.folders
        recorded = self._map(lambda volume: volume.array.record_chunks(missing_chunks), volumes)
        self._volumes = tuple(replace(volume, array=array) for volume, array in zip(volumes, recorded, strict=True))
        self._region = find_sampling_region(self._arrays, self._volumes, self.axis_order, pad=bool(pad))
        self.fields: dict[str, Field] = {
            array.name: Field(np.dtype(array.spec.dtype), array.field_shape) for array in self._arrays
        }
        index = Index.from_sizes(self._region.grid.tile_sizes(), identity=self._identity(bool(pad)))
        self.index = replace(index, presence=join_presence(volume.array.presence for volume in self._volumes))
        # By process: a child cannot use the locks and threads of its parent.
        self._states: dict[int, _ProcessState] = {}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {field.shape}" for name, field in self.fields.items())
        return f"VolumeSource({len(self.index)} items of {fields})"

    @property
    def images(self) -> dict[str, tuple[Multiscale | None, ...]]:
        """The image of each channel of each array, with its indices on axes that are not spatial; None: all NaN."""
        return {array.name: array.images for array in self._arrays}

    @property
    def bounding_box(self) -> dict[str, tuple[float, float]]:
        """Axis to begin and end of the overlap of all volumes, in world units."""
        return dict(zip(self.axis_order, self._region.bounds, strict=True))

    @property
    def sampling_box(self) -> dict[str, tuple[float, float]]:
        """Axis to begin and end of the region of centres, in world units."""
        return dict(zip(self.axis_order, self._region.allowed, strict=True))

    @property
    def voxel_size(self) -> tuple[float, ...]:
        """Distance between centres along each axis of `axis_order`, in world units."""
        return self._region.grid.step

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Number of centres along each axis."""
        return self._region.grid.counts

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that each process keeps between reads: the cache of decoded chunks."""
        return self._budget

    @property
    def reads_whole_chunks(self) -> bool:
        """True: a patch is cut from whole chunks, which its neighbours share."""
        return True

    def centre_of(self, items: ArrayLike) -> NDArray[np.float64]:
        """Return the centres (n, 3) of items, in world units and in `axis_order`."""
        return self._region.grid.centres(self.place_of(items))

    def place_of(self, items: ArrayLike) -> NDArray[np.int64]:
        """Return the places (n, 3) of items on the grid of centres, in [0, grid_shape)."""
        return self._region.grid.places(check_items(items, self))

    def item_of(self, places: ArrayLike) -> NDArray[np.int64]:
        """Return the items at places (..., 3) on the grid of centres."""
        grid_places = np.asarray(places, np.int64)
        if grid_places.shape[-1:] != (3,) or ((grid_places < 0) | (grid_places >= self.grid_shape)).any():
            raise ReadError(
                f"places of {self!r} must be three integers, below {self.grid_shape}, got {grid_places.tolist()}."
            )
        return self._region.grid.items(grid_places)

    def item_at(self, world: ArrayLike) -> NDArray[np.int64]:
        """Return the items whose centres are nearest to points (..., 3), in world units and in `axis_order`.

        Of two equally near centres, the upper one on each axis is chosen. A point more than half a `voxel_size` outside
        of the `sampling_box` raises ReadError.
        """
        grid = self._region.grid
        points = np.asarray(world, np.float64)
        if points.shape[-1:] != (3,) or not np.isfinite(points).all():
            raise OptionError(f"world must be three finite coordinates for each point, got {points.tolist()}.")
        (low, high), slack = np.transpose(self._region.allowed), 0.5 * np.asarray(grid.step) * (1 + 1e-9)
        if ((points < low - slack) | (points > high + slack)).any():
            raise ReadError(f"world must be points in the sampling box {self.sampling_box}, got {points.tolist()}.")
        places = np.floor((points - grid.origin) / grid.step + 0.5 + 1e-9)
        return grid.items(np.clip(places, 0, np.asarray(grid.counts) - 1).astype(np.int64))

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order; each distinct item is read once, in storage order."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else check_out(out, self.fields, len(items))
        if not len(items):
            return block
        for volume in self._volumes:
            volume.array.check_unchanged()
        unique, rows, again, repeats = np.unique(items, return_index=True, return_inverse=True, return_counts=True)
        for array in self._arrays:
            for channel, number in enumerate(array.volumes):
                if number is None:
                    block[array.name][rows, channel] = np.nan
        channels = self._place_channels(self.centre_of(unique))
        state = self._process_state()
        with self._remotes:
            for group in _group_patches(channels, self._volumes, len(unique), self._budget):
                self._fill(state, channels, group, (rows, repeats), block)
        if len(unique) < len(items):
            others = np.flatnonzero(rows[again] != np.arange(len(items)))
            for name in self.fields:
                block[name][others] = block[name][rows[again[others]]]
        return block

    def prepare(self, items: NDArray[np.int64]) -> int:
        """Start reading the chunks under patches into the page cache or from a URL; return the bytes not there."""
        state, found = self._process_state(), dict[_ChunkKey, None]()
        distinct = first_distinct(keep_existing(items, self), MAX_FILES)
        for begin in range(0, len(distinct), _PLACED_AT_ONCE):
            centres = self.centre_of(distinct[begin : begin + _PLACED_AT_ONCE])
            channels = self._place_channels(centres)
            keys = (key for row in range(len(centres)) for channel in channels for key in channel.chunks(row))
            found |= dict.fromkeys(key for key in keys if key not in state.cache)
            if len(found) >= MAX_FILES:
                break
        return sum(ranges.read_ahead() for ranges in self._locate(itertools.islice(found, MAX_FILES)))

    def _locate(self, keys: Iterable[_ChunkKey]) -> list[Ranges]:
        """Return where chunks lie."""
        by_volume: dict[int, list[Coordinates]] = {}
        for number, coordinates in keys:
            by_volume.setdefault(number, []).append(coordinates)
        located = [self._volumes[number].locate(chunks) for number, chunks in by_volume.items()]
        return join_ranges(located)  # channels may lie in the same files

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the files or objects of all volumes, estimated from some if there are many; None: unknown."""
        arrays = {volume.where: volume.array for volume in self._volumes}
        return sum_stored(*arrays.values())

    def read_report(self) -> dict[str, float]:
        """Return statistics of all reads of this process so far.

        Returns
        -------
        `bytes_delivered`: size of the stored voxels under all delivered patches, counted for each patch.
        `bytes_decoded` and `chunks_decoded`: what was decoded for them. `cache_hits`: how often a patch needed a chunk
        that did not have to be decoded for it. `read_amplification`: bytes decoded per byte delivered. `cached_bytes`:
        current size of the cache.
        """
        state = self._process_state()
        with state.lock:
            counts = dict(state.counts)
        amplification = counts["bytes_decoded"] / counts["bytes_delivered"] if counts["bytes_delivered"] else 0.0
        return {**counts, "read_amplification": amplification, "cached_bytes": state.cache.n_bytes}

    def close(self) -> None:
        """Close files and empty the cache; the next read opens files again."""
        state = self._states.get(os.getpid())
        if state is not None:
            state.cache.clear()
        for volume in self._volumes:
            volume.array.close()
        self._remotes.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": {}}

    def _process_state(self) -> "_ProcessState":
        process = os.getpid()
        state = self._states.get(process)
        if state is None:
            for other in set(self._states) - {process}:  # the cache of a parent would stay in memory here
                self._states.pop(other, None)
            state = self._states.setdefault(process, _ProcessState(self._budget, self._threads))
        return state

    def _place_channels(self, centres: NDArray[np.float64]) -> "list[_Channel]":
        """Return the channels to fill: all that have a volume, each with the placement of its patches."""
        known: dict[Any, Placement] = {}  # most channels of an array have the same placement
        channels = []
        for array in self._arrays:
            for channel, number in enumerate(array.volumes):
                if number is None:
                    continue
                volume = self._volumes[number]
                key = (array.name, volume.scale, volume.translation, volume.shape)
                if key not in known:
                    taps = (
                        compute_taps(
                            centres[:, axis],
                            array.full_shape[axis],
                            array.scale[axis],
                            stored=(volume.scale[axis], volume.translation[axis], volume.shape[axis]),
                            linear=array.spec.interpolation == "linear",
                        )
                        for axis in range(3)
                    )
                    known[key] = Placement(tuple(taps))
                channels.append(_Channel(array, channel, number, volume, known[key]))
        return channels

    def _fill(
        self,
        state: "_ProcessState",
        channels: "list[_Channel]",
        group: "_PatchGroup",
        rows: tuple[NDArray[np.int64], NDArray[np.int64]],
        block: Block,
    ) -> None:
        """Decode the chunks of a group of patches that are not cached, and assemble the patches."""
        held: dict[_ChunkKey, NDArray[Any]] = {}
        fetches: list[Callable[[], int]] = []
        if self._remotes:
            absent = [key for key in group.chunks if key not in state.cache]
            for ranges in self._locate(key for key in absent if self._volumes[key[0]].array.remote is not None):
                ranges.read_ahead()
        for key in group.chunks:
            chunk = state.cache.find(key)
            if chunk is None:
                fetches.append(partial(state.fetch, key, self._volumes[key[0]], held))
            else:
                held[key] = chunk
        n_decoded = sum(state.pool.run(fetches))
        by_volume: dict[int, dict[Coordinates, NDArray[Any]]] = {channel.volume_number: {} for channel in channels}
        for (number, coordinates), chunk in held.items():
            by_volume[number][coordinates] = chunk
        targets, repeats = rows
        fills, n_bytes, n_uses, n_given = list[Callable[[], int]](), 0, 0, 0
        for row in range(group.begin, group.end):
            for channel in channels:
                out = block[channel.array.name][targets[row], channel.number]
                fills.append(partial(channel.fill, row, by_volume[channel.volume_number], out))
                n_bytes += channel.stored_bytes(row) * int(repeats[row])
                n_given += out.nbytes
            n_uses += group.uses[row - group.begin] * int(repeats[row])
        if n_given < _MIN_THREADED_BYTES:
            for fill in fills:
                fill()
        else:
            state.pool.run(fills)
        state.count(bytes_delivered=n_bytes, cache_hits=n_uses - n_decoded)

    def _identity(self, pad: bool) -> str:
        """Return a hash of the specification, of the metadata of the volumes, and of a little of their content."""
        digest = hashlib.sha256(repr((self.axis_order, pad)).encode())
        for array in self._arrays:
            spec = array.spec
            options = (spec.interpolation, spec.pad_value, str(spec.dtype))
            digest.update(repr((array.name, array.field_shape, array.margin, spec.scale, array.volumes)).encode())
            digest.update(repr(options).encode())
        contents = self._map(lambda volume: volume.array.fingerprint_bytes(), self._volumes)
        for volume, content in zip(self._volumes, contents, strict=True):
            digest.update(repr((volume.shape, volume.scale, volume.translation, volume.axes, volume.at)).encode())
            digest.update(repr((str(volume.array.dtype), volume.chunk)).encode() + content)
        return digest.hexdigest()[:32]

    def _map(self, function: Callable[[StoredVolume], Result], volumes: Sequence[StoredVolume]) -> Iterable[Result]:
        """Call a function that reads a little of each volume; at once if one is at a URL."""
        return map_at_once(function, volumes) if self._remotes else map(function, volumes)


class _ProcessState:
    """The decoded chunks, threads and counters of one process."""

    def __init__(self, budget: int, threads: int | None) -> None:
        self.cache: SharedCache[NDArray[Any]] = SharedCache(budget)  # callers must not write to a chunk
        self.pool, self.lock = ReadPool(threads), threading.Lock()
        self.counts = dict.fromkeys(("bytes_delivered", "bytes_decoded", "chunks_decoded", "cache_hits"), 0)

    def count(self, **more: int) -> None:
        """Add to the counters."""
        with self.lock:
            for name, number in more.items():
                self.counts[name] += number

    def fetch(self, key: _ChunkKey, volume: StoredVolume, held: dict[_ChunkKey, NDArray[Any]]) -> int:
        """Put a chunk into `held`; return 1 if it had to be decoded, else 0."""
        loaded = []

        def load() -> NDArray[Any]:
            chunk, n_bytes = volume.load(key[1])
            loaded.append(1)
            self.count(bytes_decoded=n_bytes, chunks_decoded=1)
            return chunk

        held[key] = self.cache.get(key, load, volume.chunk_bytes(key[1]))
        return len(loaded)


class _Channel(NamedTuple):
    """One channel of one array, for all patches of a read."""

    array: ResolvedArray
    number: int
    volume_number: int
    volume: StoredVolume
    placement: Placement

    def chunks(self, row: int) -> list[_ChunkKey]:
        """Return the chunks that a patch needs."""
        found = find_overlaps(self.volume.chunk, self.placement.low[row], self.placement.high[row])
        return [(self.volume_number, coordinates) for coordinates, _, _ in found]

    def stored_bytes(self, row: int) -> int:
        """Return the size of the stored voxels under a patch."""
        return self.placement.n_voxels(row) * self.volume.item_bytes

    def fill(self, row: int, chunks: Mapping[Coordinates, NDArray[Any]], out: NDArray[Any]) -> int:
        """Assemble a patch; return 0."""
        if not self.placement.whole[row]:
            out[...] = self.array.spec.pad_value
        fill_patch(self.volume, chunks, self.placement, row, out if out.ndim == 3 else out[None])
        return 0


class _PatchGroup(NamedTuple):
    """Consecutive patches [begin, end), whose chunks are held in memory at once."""

    begin: int
    end: int
    chunks: dict[_ChunkKey, int]
    """Size of each chunk."""

    uses: list[int]
    """Number of chunks that each patch needs."""


def _group_patches(
    channels: list[_Channel], volumes: tuple[StoredVolume, ...], n_patches: int, budget: int
) -> Iterator[_PatchGroup]:
    """Yield all patches in groups whose chunks fit the budget; a patch that exceeds it alone begins a group."""
    begin, chunks, uses, n_bytes = 0, dict[_ChunkKey, int](), list[int](), 0
    for row in range(n_patches):
        keys = [key for channel in channels for key in channel.chunks(row)]
        fresh = {key: volumes[key[0]].chunk_bytes(key[1]) for key in keys if key not in chunks}
        if uses and fresh and n_bytes + sum(fresh.values()) > budget:
            yield _PatchGroup(begin, row, chunks, uses)
            begin, chunks, uses, n_bytes = row, {}, [], 0
            fresh = {key: volumes[key[0]].chunk_bytes(key[1]) for key in keys}
        chunks |= fresh
        uses.append(len(keys))
        n_bytes += sum(fresh.values())
    yield _PatchGroup(begin, n_patches, chunks, uses)
