"""Items in tar shards, read like an array."""
