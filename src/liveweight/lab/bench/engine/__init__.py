"""Benchmarks of the embedded engine: throughput, cost of updates while it serves and while it is idle."""
