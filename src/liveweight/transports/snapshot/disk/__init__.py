"""What a snapshot is on disk: names, formats, parts, writing, opening, pruning."""
