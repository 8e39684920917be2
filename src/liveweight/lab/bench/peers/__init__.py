"""The alternatives: other methods to bring a trainer's weights to an engine's ranks, each in its best form, each checked."""
