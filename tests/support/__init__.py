"""What several suites share: strategies, cluster processes, checks for leftovers."""
