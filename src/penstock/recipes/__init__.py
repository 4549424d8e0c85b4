"""Whole pipelines, each a page over the core."""
