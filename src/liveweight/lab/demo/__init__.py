"""Runs that show what live updates are for: the demos."""
