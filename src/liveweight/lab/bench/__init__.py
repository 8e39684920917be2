"""Benchmarks. Each returns its figures; cli/bench prints them."""
