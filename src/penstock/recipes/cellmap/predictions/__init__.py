"""Predictions written back as OME-NGFF images."""
