"""Zarr arrays: a fast path for local stores, and zarr-python for all others."""
