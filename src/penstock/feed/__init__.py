"""Towards torch: batches of tensors, on a device."""
