"""Decoding of member payloads, by extension; no payload can run code or take more memory than it justifies."""
