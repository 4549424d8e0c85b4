"""What all processes that read a torch dataset know: whether to augment, and in which epoch each item is.

torch's own DataLoader tells a dataset neither that an epoch begins nor which one it is. Without `set_epoch`, the n-th
read of an item counts as epoch n, over all workers: forked or spawned, persistent or not. Augmentation is then the same
for any number of workers, as long as epochs run to their end and read each item once.
"""

from multiprocessing import context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.run.processes.shared_pages import SharedPages

__all__ = ["AugmentState"]

_TRAINING, _EPOCH, _SETTINGS = 0, 1, 2
_BY_READS = -1
_MAX_COUNTERS = 1 << 26  # 256 MiB if all are used; a volume has an item for each voxel, and few are ever read
_COPIED_BYTES = 1 << 20


class AugmentState:
    """Settings and counters in memory that a dataset shares with all of its workers. A copy has its own.

    Of more than 67,108,864 items, those that are that many apart share a counter: all reads of an item still count as
    different epochs, but which ones may depend on the workers.
    """

    def __init__(self, n_items: int, *, training: bool = True, epoch: int | None = None) -> None:
        self.n_items = n_items
        self._keep(SharedPages(8 * _SETTINGS + 4 * min(max(n_items, 1), _MAX_COUNTERS)))
        self.training = training
        self._settings[_EPOCH] = _BY_READS if epoch is None else epoch

    @property
    def training(self) -> bool:
        """Whether items are augmented."""
        return bool(self._settings[_TRAINING])

    @training.setter
    def training(self, training: bool) -> None:
        self._settings[_TRAINING] = int(training)

    @property
    def epoch(self) -> int | None:
        """The epoch from `set_epoch`; None if the reads of each item are counted instead."""
        epoch = int(self._settings[_EPOCH])
        return None if epoch == _BY_READS else epoch

    def set_epoch(self, epoch: int) -> None:
        """Read all items in `epoch` from now on, also in running workers."""
        self._settings[_EPOCH] = check_integer("epoch", epoch, at_least=0)

    def begin_read(self, number: int) -> int:
        """Return the epoch in which an item is read now, and count the read."""
        epoch = self.epoch
        if epoch is not None:
            return epoch
        counter = number % len(self._counts)
        n_reads = int(self._counts[counter])
        self._counts[counter] = n_reads + 1
        return n_reads

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is not None:  # a worker gets this memory
            return {"n_items": self.n_items, "pages": self._pages}
        return {"n_items": self.n_items, "training": self.training, "epoch": self.epoch, "reads": self._find_reads()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "pages" in state:
            self.n_items = state["n_items"]
            self._keep(state["pages"])
            return
        self.__init__(state["n_items"], training=state["training"], epoch=state["epoch"])  # type: ignore[misc]
        counters, n_reads = state["reads"]
        self._counts[counters] = n_reads

    def _keep(self, pages: SharedPages) -> None:
        self._pages = pages
        self._settings = pages.memory[: 8 * _SETTINGS].view(np.int64)
        self._counts = pages.memory[8 * _SETTINGS :].view(np.int32)

    def _find_reads(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the counters that are not 0, and their values."""
        found, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for at in range(8 * _SETTINGS, self._pages.n_bytes, _COPIED_BYTES):
            counts = np.frombuffer(self._pages.read(_COPIED_BYTES, at), np.int32)
            used = np.flatnonzero(counts)
            found.append(used + (at - 8 * _SETTINGS) // 4)
            values.append(counts[used])
        return np.concatenate(found), np.concatenate(values)
