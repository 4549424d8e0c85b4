"""Items from audio files: windows or whole files."""
