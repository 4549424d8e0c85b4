"""NWB files, cut into windows."""
