"""Files: durable writes, locks, and what lies at a path."""
