"""The scalars that a watch of a local loader logs."""

__all__ = ["NAMES"]

NAMES = {
    "data/wait_ms",
    "data/wait_fraction",
    "data/batches_per_second",
    "data/items_per_second",
    "data/mb_per_second",
    "data/resident_mb",
    "data/startup_ms",
    "data/warnings",
}
