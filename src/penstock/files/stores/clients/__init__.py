"""Clients: single requests by obstore, or by a process of their own after a fork."""
