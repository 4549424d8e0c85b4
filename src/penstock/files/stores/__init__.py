"""Stores at a URL: objects in buckets, and files behind HTTP servers."""
