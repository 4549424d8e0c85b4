"""Names that can still be imported from `penstock`, without being listed there."""
