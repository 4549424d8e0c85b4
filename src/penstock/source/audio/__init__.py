"""Windows of audio files."""
