"""A snapshot on disk: names, format, parts, writing, opening, pruning."""
