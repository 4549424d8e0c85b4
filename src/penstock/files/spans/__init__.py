"""Bytes of remote objects: fetched ahead of use, kept in memory or in a cache folder, and verified."""
