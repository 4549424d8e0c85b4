"""Zarr arrays: decoded here, or read by zarr-python."""
