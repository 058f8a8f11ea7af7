"""What only tests and benchmarks use: the engine in virtual time, checkers, seeded workloads and traffic."""
