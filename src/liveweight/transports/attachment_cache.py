"""The cache of attachments, bindings and plans that readers keep across rounds: a dictionary in order of use."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Kept = TypeVar("Kept")


def evict_oldest(kept: dict[Key, Kept], most: int) -> list[Kept]:
    """Remove the least recently used entries beyond `most`, and return them. A caller that uses an entry puts it last."""
    dropped = []
    while len(kept) > most:
        dropped.append(kept.pop(next(iter(kept))))
    return dropped
