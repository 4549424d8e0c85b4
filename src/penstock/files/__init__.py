"""File access: durable writes, folder locks, regular files and figures."""
