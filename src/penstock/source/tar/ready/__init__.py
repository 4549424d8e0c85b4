"""Open shards that are ready to be read from: any items of theirs with a few calls of C."""
