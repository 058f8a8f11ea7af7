"""The value policy: keep the states that save the most seconds per byte; see ``policy``."""
