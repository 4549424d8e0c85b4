"""Patches of multiscale volumes."""
