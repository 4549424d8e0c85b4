"""Data that are not in memory: pages are dropped before every epoch, and rates are compared with those of the disk."""

from bench.cold import items, shared_memory, waiting, warm_epochs, whole_files, zarr_windows

__all__ = ["PARTS"]

PARTS = {
    "cold-large": items.run_large,
    "cold-peers": items.run_peers,
    "cold-small": items.run_small,
    "cold-zarr": zarr_windows.run,
    "cold-whole-files": whole_files.run,
    "cold-waiting": waiting.run,
    "cold-warm": warm_epochs.run,
    "cold-shared-memory": shared_memory.run,
}
