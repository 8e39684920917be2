"""Pages of the KV cache: which are free, which are shared, and which still hold something that a later request may use again.

Pure bookkeeping; the memory is on the ranks (rank/attention). A full page is known by a key: a digest over the weights that computed it,
every token before it and its own. So two requests with the same beginning share pages, and pages of other weights are never found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

KEY_BYTES = 16


def root_key(content: str) -> bytes:
    """The key before the first page: of the weights alone, by the digest of their content."""
    return hashlib.blake2b(content.encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page after the one with key `parent`. Cryptographic: no prompt can be made to hit another's pages."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class BlockPool:
    """All pages of a replica. Every rank has the same page numbers. Used by the scheduler's thread."""

    def __init__(self, count: int, *, caching: bool = True) -> None:
        self.count = count
        self._caching = caching
        self._users = [0] * count
        self._keys: list[bytes | None] = [None] * count
        self._empty = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # no user, but a key: least recently used first
        self._found: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody uses, remembered ones included."""
        return len(self._empty) + len(self._idle)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of keys that is remembered, from the first; they are in use from now on."""
        pages: list[int] = []
        for key in keys:
            page = self._found.get(key)
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return pages

    def take(self, count: int) -> list[int] | None:
        """That many pages, or None if there are not as many. Remembered pages are given up last, the oldest first."""
        if count > self.free:
            return None
        pages = []
        for _ in range(count):
            page = self._empty.pop() if self._empty else self._evict()
            self._users[page] = 1
            pages.append(page)
        return pages

    def remember(self, page: int, key: bytes) -> None:
        """A page in use is full, and its content has this key. The first page with a key is the one that is found."""
        if self._caching and key not in self._found and self._keys[page] is None:
            self._keys[page] = key
            self._found[key] = page

    def release(self, pages: Sequence[int]) -> None:
        """One user fewer for each. The end of a sequence is forgotten before its beginning."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._keys[page] is None:
                self._empty.append(page)
            else:
                self._idle[page] = None

    def forget(self) -> None:
        """Forget what pages hold; those in use stay with their users."""
        self._found.clear()
        self._keys = [None] * self.count
        self._empty += self._idle
        self._idle.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key = self._keys[page]
        if key is not None:
            del self._found[key]
        self._keys[page] = None
        return page
