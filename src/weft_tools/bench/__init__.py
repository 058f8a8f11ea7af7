"""``weft bench``: the speed of kernels, the engine and a server on this machine. docs/benchmarks.md."""
