"""The torture: an engine under load whose updates are disturbed at random moments, and a count of everything that must not be."""
