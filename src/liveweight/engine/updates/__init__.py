"""Live updates inside the engine: the leader beside the scheduler, requested updates, verification."""
