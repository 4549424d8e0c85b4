"""The storage behind a path: what it is, how fast it reads, and which order of items fits it."""
