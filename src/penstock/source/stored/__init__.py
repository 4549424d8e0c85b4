"""Rows of stored arrays: zarr, `.npy` and HDF5."""
