"""Shards: written, described, checked."""
