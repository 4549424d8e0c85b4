"""Speed and memory, as ratios to limits and peers that are measured in the same run."""
