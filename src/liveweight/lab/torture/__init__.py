"""The torture: an engine under load whose updates are disturbed at random moments, and counts of what must never happen."""
