"""What readers keep across rounds: the most recently used ones."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Kept = TypeVar("Kept")


def shorten(kept: dict[Key, Kept], most: int) -> list[Kept]:
    """Drop the least recently used ones beyond that many, and return them; whoever uses one puts it last."""
    dropped = []
    while len(kept) > most:
        dropped.append(kept.pop(next(iter(kept))))
    return dropped
