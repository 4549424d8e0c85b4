"""Where items are: reads, and no order, no batches, no randomness."""
