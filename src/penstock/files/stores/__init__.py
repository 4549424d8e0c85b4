"""Stores at a URL: objects in buckets, files behind HTTP servers, and whatever fsspec reads."""
