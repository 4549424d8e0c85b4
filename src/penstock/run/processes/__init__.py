"""Executor in worker processes."""
