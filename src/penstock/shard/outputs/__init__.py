"""Where datasets are written: a folder, or a URL."""
