"""One rank of an engine: staging, commits at a boundary, verification of live weights, targets. Knows ports, never an engine."""
