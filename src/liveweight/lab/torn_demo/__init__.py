"""`liveweight demo torn`: a trainer is killed in the middle of an update, in place and by liveweight."""
