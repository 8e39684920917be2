"""Benchmarks of rounds over shared memory, and of the freeze."""
