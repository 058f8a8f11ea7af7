"""Several HTTP processes on one port (``--http-workers``). See ``supervisor`` for what each process owns."""
