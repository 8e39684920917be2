"""One rank, and the leader that decides for its replica: states, rounds, shadow, boundary. Knows ports, never an engine."""
