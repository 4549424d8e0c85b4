"""From recordings to shards: what can be read, in which order it is written, and who does it."""
