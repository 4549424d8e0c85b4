"""Shards at a URL: which bytes of them are fetched, and when."""
