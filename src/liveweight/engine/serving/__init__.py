"""The engine's process: requests, scheduling, the step stream to the ranks, pauses and sleep."""
