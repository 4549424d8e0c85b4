"""Metadata of many items: as they are stored, and as dicts that are made when they are looked at."""
