"""NWB recordings, cut into windows."""
