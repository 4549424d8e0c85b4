"""Patches of multiscale volumes: several arrays, each with a shape and a scale of its own, around one centre."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError
from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.source.checks import allocate_block, check_items, check_out, check_span
from penstock.source.read_pool import ReadPool
from penstock.source.volume.array import PlacedArray, VolumeArray, placed_arrays
from penstock.source.volume.cache import ChunkCache
from penstock.source.volume.centres import layout_of
from penstock.source.volume.grid import taps_of
from penstock.source.volume.patch import Coordinates, Placement, StoredVolume, cuts, fill_patch

__all__ = ["VolumeArray", "VolumeSource"]

_Key = tuple[int, Coordinates]
"""The number of a volume, and one of its chunks."""

_SHARED_BYTES = 1 << 20  # of patches: putting together fewer takes less time than starting threads


class VolumeSource:
    """Items are patches around centres on a regular grid, as far as all volumes reach.

    The grid is that of the largest scale among the arrays (see `volume_layout`), and items are numbered block by block:
    centres that lie in one stored chunk of the finest level that is read have consecutive numbers, and are a chunk of
    the index. What lies where is said in `volume_grid`. Volumes are only read, never written to.

    1. A chunk that is damaged: DamageError, which names the array and the chunk; one that cannot be read: ReadError.
       One that is not stored: the fill value, where the array says what that is; DamageError where it does not.
    2. An array whose metadata change, or that goes away, while it is open: ReadError.
    3. A fork in the middle: each process has a cache, counters and threads of its own.

    Parameters
    ----------
    arrays
        Field name to what is wanted.
    axis_order
        Names of the three axes of space, in the order of shapes, scales and coordinates; volumes may be stored in any
        other. Arrays of two axes have the last two, and are slices across the first.
    pad
        True: all centres in the intersection of all volumes are items, and what lies outside is `pad_value`. False:
        only those whose patches, with their margins, lie in their volumes altogether.
    cache_bytes
        Decoded chunks that are kept, in each process. A patch that is put together holds its own chunks besides.
    margin
        Field name to voxels that are read beyond the patch on each side of each axis, and make the field larger: for
        transforms that turn the patch and crop it.
    threads
        Chunks decoded at once, by all readers of this process together; None: one for each CPU of this process, and
        one in a worker process, of which there are several.

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
        pad: bool = True,
        cache_bytes: int = 256 * 2**20,
        margin: Mapping[str, Sequence[int]] | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            check_integer("threads", threads, at_least=1)
        self.axis_order = tuple(axis_order)
        if len(self.axis_order) != 3 or len(set(self.axis_order)) != 3:
            raise OptionError(f"axis_order={axis_order!r}; name three different axes, such as 'zyx'.")
        if not isinstance(pad, bool | np.bool_):
            raise OptionError(f"pad={pad!r}; use True or False.")
        self._budget, self._threads = check_integer("cache_bytes", cache_bytes, at_least=0), threads
        self._placed, self._volumes = placed_arrays(arrays, self.axis_order, margin or {})
        self._layout = layout_of(self._placed, self._volumes, self.axis_order, pad=bool(pad))
        self.fields: dict[str, Field] = {
            array.name: Field(np.dtype(array.spec.dtype), array.field_shape) for array in self._placed
        }
        self.index = Index.from_sizes(self._layout.grid.block_sizes(), identity=self._identity(bool(pad)))
        # By process: locks and threads of a parent are of no use to its fork.
        self._states: dict[int, _State] = {}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {field.shape}" for name, field in self.fields.items())
        return f"VolumeSource({len(self.index)} items of {fields})"

    @property
    def bounding_box(self) -> dict[str, tuple[float, float]]:
        """Axis to begin and end of where all volumes overlap, in world units."""
        return dict(zip(self.axis_order, self._layout.bounds, strict=True))

    @property
    def sampling_box(self) -> dict[str, tuple[float, float]]:
        """Axis to begin and end of where centres may lie, in world units."""
        return dict(zip(self.axis_order, self._layout.allowed, strict=True))

    @property
    def voxel_size(self) -> tuple[float, ...]:
        """Distance of centres along each axis of `axis_order`, in world units."""
        return self._layout.grid.step

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """How many centres there are along each axis."""
        return self._layout.grid.counts

    def centre_of(self, items: ArrayLike) -> NDArray[np.float64]:
        """Return the centres, (n, 3), of items, in world units and in `axis_order`."""
        return self._layout.grid.centres(self.place_of(items))

    def place_of(self, items: ArrayLike) -> NDArray[np.int64]:
        """Return the places, (n, 3), of items on the grid of centres: from 0 to before `grid_shape`."""
        return self._layout.grid.places(check_items(items, self))

    def item_of(self, places: ArrayLike) -> NDArray[np.int64]:
        """Return the items at places, (..., 3), on the grid of centres."""
        wanted = np.asarray(places, np.int64)
        if wanted.shape[-1:] != (3,) or ((wanted < 0) | (wanted >= self.grid_shape)).any():
            raise ReadError(f"Places {wanted.tolist()} of {self!r}: centres have three, up to {self.grid_shape}.")
        return self._layout.grid.items(wanted)

    def item_at(self, world: ArrayLike) -> NDArray[np.int64]:
        """Return the items whose centres are nearest to points, (..., 3), in world units and in `axis_order`.

        Of two that are equally near it is the upper one, on each axis. A point more than half a `voxel_size` outside of
        the `sampling_box` raises ReadError.
        """
        grid = self._layout.grid
        points = np.asarray(world, np.float64)
        if points.shape[-1:] != (3,) or not np.isfinite(points).all():
            raise OptionError(f"world={points.tolist()}; give three finite coordinates for each point.")
        (low, high), slack = np.transpose(self._layout.allowed), 0.5 * np.asarray(grid.step) * (1 + 1e-9)
        if ((points < low - slack) | (points > high + slack)).any():
            raise ReadError(f"Points {points.tolist()} reach outside of the sampling box {self.sampling_box}.")
        places = np.floor((points - grid.origin) / grid.step + 0.5 + 1e-9)
        return grid.items(np.clip(places, 0, np.asarray(grid.counts) - 1).astype(np.int64))

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, in the given order; they are read in the order of storage, and repeats once."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else check_out(out, self.fields, len(items))
        if not len(items):
            return block
        for volume in self._volumes:
            volume.array.check_unchanged()
        unique, rows, again, repeats = np.unique(items, return_index=True, return_inverse=True, return_counts=True)
        for array in self._placed:
            for channel, number in enumerate(array.volumes):
                if number is None:
                    block[array.name][rows, channel] = np.nan
        parts = self._parts(self.centre_of(unique))
        state = self._state()
        for group in _groups(parts, self._volumes, len(unique), self._budget):
            self._fill(state, parts, group, (rows, repeats), block)
        if len(unique) < len(items):
            others = np.flatnonzero(rows[again] != np.arange(len(items)))
            for name in self.fields:
                block[name][others] = block[name][rows[again[others]]]
        return block

    def read_report(self) -> dict[str, float]:
        """Return what this process has read so far.

        Returns
        -------
        `bytes_delivered`: of the stored voxels under all patches given, each patch for itself. `bytes_decoded` and
        `chunks_decoded`: what was decoded for them. `cache_hits`: how often a patch needed a chunk that did not have to
        be decoded for it. `read_amplification`: bytes decoded over bytes delivered. `cached_bytes`: what is kept now.
        """
        state = self._state()
        with state.lock:
            delivered, hits = state.bytes_delivered, state.cache_hits
        decoded = state.cache.decoded
        amplification = decoded["bytes_decoded"] / delivered if delivered else 0.0
        return {
            "bytes_delivered": delivered,
            **decoded,
            "cache_hits": hits,
            "read_amplification": amplification,
            "cached_bytes": state.cache.n_bytes,
        }

    def close(self) -> None:
        """Let go of files and of the chunks that are kept; the next read starts anew."""
        state = self._states.get(os.getpid())
        if state is not None:
            state.cache.clear()
        for volume in self._volumes:
            volume.array.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": {}}

    def _state(self) -> "_State":
        process = os.getpid()
        state = self._states.get(process)
        if state is None:
            for other in set(self._states) - {process}:  # of a parent: what it has kept would stay in memory here
                self._states.pop(other, None)
            state = self._states.setdefault(process, _State(self._budget, self._threads))
        return state

    def _parts(self, centres: NDArray[np.float64]) -> "list[_Part]":
        """Return what has to be filled: one part for each channel that has a volume."""
        known: dict[Any, Placement] = {}  # the channels of one array mostly lie alike
        parts = []
        for array in self._placed:
            for channel, number in enumerate(array.volumes):
                if number is None:
                    continue
                volume = self._volumes[number]
                key = (array.name, volume.scale, volume.translation, volume.shape)
                if key not in known:
                    taps = (
                        taps_of(
                            centres[:, axis],
                            array.full_shape[axis],
                            array.scale[axis],
                            stored=(volume.scale[axis], volume.translation[axis], volume.shape[axis]),
                            linear=array.spec.interpolation == "linear",
                        )
                        for axis in range(3)
                    )
                    known[key] = Placement(tuple(taps))
                parts.append(_Part(array, channel, number, volume, known[key]))
        return parts

    def _fill(
        self,
        state: "_State",
        parts: "list[_Part]",
        group: "_Group",
        rows: tuple[NDArray[np.int64], NDArray[np.int64]],
        block: Block,
    ) -> None:
        """Decode the chunks of some patches, as far as they are not kept, and put the patches together."""
        held: dict[_Key, NDArray[Any]] = {}
        fetches: list[Callable[[], int]] = []
        for key in group.chunks:
            chunk = state.cache.find(key)
            if chunk is None:
                fetches.append(partial(state.fetch, key, self._volumes[key[0]], held))
            else:
                held[key] = chunk
        n_decoded = sum(state.helpers.run(fetches))
        by_volume: dict[int, dict[Coordinates, NDArray[Any]]] = {part.number: {} for part in parts}
        for (number, coordinates), chunk in held.items():
            by_volume[number][coordinates] = chunk
        targets, repeats = rows
        fills, n_bytes, n_uses, n_given = list[Callable[[], int]](), 0, 0, 0
        for row in range(group.begin, group.end):
            for part in parts:
                out = block[part.array.name][targets[row], part.channel]
                fills.append(partial(part.fill, row, by_volume[part.number], out))
                n_bytes += part.stored_bytes(row) * int(repeats[row])
                n_given += out.nbytes
            n_uses += group.uses[row - group.begin] * int(repeats[row])
        if n_given < _SHARED_BYTES:
            for fill in fills:
                fill()
        else:
            state.helpers.run(fills)
        with state.lock:
            state.bytes_delivered += n_bytes
            state.cache_hits += n_uses - n_decoded

    def _identity(self, pad: bool) -> str:
        """Return what stands for the content: what is asked for, what the volumes say, and a little of them."""
        digest = hashlib.sha256(repr((self.axis_order, pad)).encode())
        for array in self._placed:
            spec = array.spec
            options = (spec.interpolation, spec.pad_value, str(spec.dtype))
            digest.update(repr((array.name, array.field_shape, array.margin, spec.scale, array.volumes)).encode())
            digest.update(repr(options).encode())
        for volume in self._volumes:
            digest.update(repr((volume.shape, volume.scale, volume.translation, volume.axes, volume.at)).encode())
            digest.update(repr((str(volume.array.dtype), volume.chunk)).encode() + volume.array.fingerprint_bytes())
        return digest.hexdigest()[:32]


class _State:
    """What one process has: chunks, threads and counters."""

    def __init__(self, budget: int, threads: int | None) -> None:
        self.cache, self.helpers, self.lock = ChunkCache(budget), ReadPool(threads), threading.Lock()
        self.bytes_delivered = 0
        self.cache_hits = 0

    def fetch(self, key: _Key, volume: StoredVolume, held: dict[_Key, NDArray[Any]]) -> int:
        """Put a chunk into `held`; return 1 where it had to be decoded."""
        held[key], fresh = self.cache.fetch(key, partial(volume.load, key[1]))
        return int(fresh)


class _Part:
    """One channel of one array, for all patches of a read."""

    def __init__(
        self, array: PlacedArray, channel: int, number: int, volume: StoredVolume, placement: Placement
    ) -> None:
        self.array, self.channel, self.number, self.volume, self.placement = array, channel, number, volume, placement
        self._item_bytes = volume.array.dtype.itemsize

    def chunks(self, row: int) -> list[_Key]:
        """Return the chunks that a patch needs."""
        found = cuts(self.volume.chunk, self.placement.low[row], self.placement.high[row])
        return [(self.number, coordinates) for coordinates, _, _ in found]

    def stored_bytes(self, row: int) -> int:
        """Return the bytes of the stored voxels under a patch."""
        return self.placement.n_voxels(row) * self._item_bytes

    def fill(self, row: int, chunks: Mapping[Coordinates, NDArray[Any]], out: NDArray[Any]) -> int:
        """Put a patch together."""
        if not self.placement.whole[row]:
            out[...] = self.array.spec.pad_value
        fill_patch(self.volume, chunks, self.placement, row, out if out.ndim == 3 else out[None])
        return 0


class _Group:
    """Neighbouring patches, from `begin` to before `end`, whose chunks are held together."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.chunks: dict[_Key, int] = {}
        """And the bytes of each."""

        self.uses: list[int] = []
        """Chunks that each patch needs."""

    def add(self, keys: list[_Key], fresh: dict[_Key, int]) -> None:
        self.chunks |= fresh
        self.uses.append(len(keys))
        self.end += 1


def _groups(parts: list[_Part], volumes: tuple[StoredVolume, ...], n_patches: int, budget: int) -> Iterator[_Group]:
    """Yield all patches in groups whose chunks fit the budget; where those of one patch do not, it begins a group."""
    group, n_bytes = _Group(0), 0
    for row in range(n_patches):
        keys = [key for part in parts for key in part.chunks(row)]
        fresh = {key: volumes[key[0]].chunk_bytes(key[1]) for key in keys if key not in group.chunks}
        if group.uses and fresh and n_bytes + sum(fresh.values()) > budget:
            yield group
            group, n_bytes = _Group(row), 0
            fresh = {key: volumes[key[0]].chunk_bytes(key[1]) for key in keys}
        group.add(keys, fresh)
        n_bytes += sum(fresh.values())
    yield group
