"""Which items each batch holds. Pure: integers in, integers out; no files, no threads, no torch."""
