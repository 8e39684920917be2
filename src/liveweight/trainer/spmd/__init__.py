"""A trainer of several ranks: rank 0 drives the rounds, the other ranks report to it."""
