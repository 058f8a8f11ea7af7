"""The cache policy that keeps what saves most seconds per byte; see ``policy``."""
