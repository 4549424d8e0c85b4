"""Figures of items."""
