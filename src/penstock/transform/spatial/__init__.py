"""One random change of space for all arrays of an item."""
