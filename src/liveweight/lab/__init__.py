"""What shows and measures the product: demos, benchmarks, torture. Only cli/ imports it."""
