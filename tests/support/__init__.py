"""Code that only tests and benchmarks use: the engine in virtual time, checkers, workloads, naive twins of ops."""
