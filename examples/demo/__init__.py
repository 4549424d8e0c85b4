"""The demo: convert recordings to shards, train a decoder, kill it, resume bit for bit, and find a damaged bit."""
