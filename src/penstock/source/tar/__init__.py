"""Random access to items in tar shards."""
