"""Where datasets and archives lie: in folders of this machine, or at URLs."""
