"""``weft bench``: how fast kernels, the engine and a server are, on this machine, now. docs/bench.md."""
