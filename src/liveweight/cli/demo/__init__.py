"""`liveweight demo` and `liveweight demo torn`: options, and what they show on a terminal."""
