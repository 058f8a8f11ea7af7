"""Several HTTP processes on one port (``--http-workers``). See ``supervisor`` for the duties of each process."""
