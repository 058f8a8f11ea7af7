"""Engines in other processes: the engine process, its messages, and the client in the HTTP process."""
