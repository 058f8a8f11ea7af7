"""The value policy: keep what saves the most seconds per byte; see ``policy``."""
