"""Clients: single requests by obstore, by fsspec, or by a process of their own after a fork."""
