"""The order of a mixture of sources: which of them comes at each position, and which of its items."""
