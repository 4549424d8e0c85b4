"""What all processes that read a torch dataset know: whether to augment, and in which epoch each item is.

torch's own DataLoader tells a dataset neither that an epoch begins nor which one it is. Without `set_epoch`, the n-th
read of an item counts as epoch n, over all workers: forked or spawned, persistent or not. Augmentation is then the same
for any number of workers, as long as epochs run to their end and read each item once.
"""

import struct
from multiprocessing import context
from typing import Any

from penstock.core.checks import check_integer
from penstock.run.processes.shared_pages import SharedPages

__all__ = ["AugmentState"]

_SETTINGS = struct.Struct("=?7xq")  # whether to augment, and the epoch
_COUNTER = struct.Struct("=i")
_BY_READS = -1
_MAX_COUNTERS = 1 << 26  # 256 MiB if all are used; a volume has an item for each voxel, and few are ever read
_COPIED_BYTES = 1 << 16


class AugmentState:
    """Settings and counters in memory that a dataset shares with all of its workers. A copy has its own.

    Of more than 67,108,864 items, those that are that many apart share a counter: all reads of an item still count as
    different epochs, but which ones may depend on the workers.
    """

    def __init__(self, n_items: int, *, training: bool = True, epoch: int | None = None) -> None:
        self.n_items = n_items
        self._n_counters = min(max(n_items, 1), _MAX_COUNTERS)
        # Read and written as a file: mapping it would take a second file descriptor, for each of hundreds of volumes.
        self._pages = SharedPages(_SETTINGS.size + _COUNTER.size * self._n_counters)
        self._set(training, _BY_READS if epoch is None else epoch)

    @property
    def training(self) -> bool:
        """Whether items are augmented."""
        return self._settings[0]

    @training.setter
    def training(self, training: bool) -> None:
        self._set(training, self._settings[1])

    @property
    def epoch(self) -> int | None:
        """The epoch from `set_epoch`; None if the reads of each item are counted instead."""
        epoch = self._settings[1]
        return None if epoch == _BY_READS else epoch

    def set_epoch(self, epoch: int) -> None:
        """Read all items in `epoch` from now on, also in running workers."""
        self._set(self.training, check_integer("epoch", epoch, at_least=0))

    def begin_read(self, number: int) -> int:
        """Return the epoch in which an item is read now, and count the read."""
        epoch = self.epoch
        if epoch is not None:
            return epoch
        at = _SETTINGS.size + _COUNTER.size * (number % self._n_counters)
        (n_reads,) = _COUNTER.unpack(self._pages.read(_COUNTER.size, at))
        self._pages.write(_COUNTER.pack(n_reads + 1), at)
        return int(n_reads)

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is not None:  # a worker gets this memory
            return self.__dict__
        return {"n_items": self.n_items, "training": self.training, "epoch": self.epoch, "reads": self._find_reads()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "reads" not in state:
            self.__dict__.update(state)
            return
        self.__init__(state["n_items"], training=state["training"], epoch=state["epoch"])  # type: ignore[misc]
        for at, counters in state["reads"]:
            self._pages.write(counters, at)

    @property
    def _settings(self) -> tuple[bool, int]:
        training, epoch = _SETTINGS.unpack(self._pages.read(_SETTINGS.size, 0))
        return training, epoch

    def _set(self, training: bool, epoch: int) -> None:
        self._pages.write(_SETTINGS.pack(training, epoch), 0)

    def _find_reads(self) -> list[tuple[int, bytes]]:
        """Return the counters in pieces, each with its place; those that are all 0 are left out."""
        return [
            (at, counters)
            for at in range(_SETTINGS.size, self._pages.n_bytes, _COPIED_BYTES)
            if (counters := self._pages.read(_COPIED_BYTES, at)).strip(b"\0")
        ]
