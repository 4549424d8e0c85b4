"""Executes plans: inline, in threads, in worker processes. Never changes what a plan yields."""
