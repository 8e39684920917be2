"""Routes for operators: weights, updates, undo, pause, sleep, verification."""
