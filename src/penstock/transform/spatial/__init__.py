"""Random spatial transforms, applied alike to all arrays of an item."""
