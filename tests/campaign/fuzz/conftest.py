"""Nothing here is a test or has doctests, and what the targets import takes seconds."""

collect_ignore_glob = ["*.py", "targets/*.py"]
