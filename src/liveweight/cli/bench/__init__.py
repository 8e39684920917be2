"""`liveweight bench`: one file for each group of measurements."""
