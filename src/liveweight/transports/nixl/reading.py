"""A reading of one offer: posts reads of pieces ahead, waits for them, and copies pieces out of the landing buffer.

Owns the reads in flight. Any waiting thread handles all pieces that have arrived: no thread waits for another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from liveweight.devices.memory import Memory
from liveweight.spec.deadline import Deadline
from liveweight.spec.row_table import Table
from liveweight.transports.nixl.session import SLOTS, NixlAttachment, NixlBinding, NixlSession, pause
from liveweight.transports.port import GoOn, check_generation, patient
from liveweight.wire.messages.values import Offer

CHECK_S = 10.0
"""How long reading a source's generation may take."""
END_S = 1.0
"""How long reads that nobody wants any more are given to finish. Then the session is closed, which ends them."""


class NixlReading:
    """A rank's part of one offer. Holds the shadow while it lives."""

    def __init__(
        self,
        offer: Offer,
        session: NixlSession,
        attachment: NixlAttachment,
        binding: NixlBinding,
        shadow: Sequence[Memory],
    ) -> None:
        self.overlaps = True
        plan = binding.plan
        self.offer, self.rows = offer, plan.rows
        self._session, self._attachment, self._binding = session, attachment, binding
        self._shadow = tuple(shadow)
        self._copies: Table = np.concatenate([[0], plan.piece_landed])
        self._new = set(range(len(binding.requests)))
        self._flying: dict[int, None] = {}
        self._copying: set[int] = set()
        self._done = np.zeros(len(binding.requests), dtype=bool)
        self._stopped = threading.Event()
        self._over = False
        session.readings += 1

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        """Have rows [first, last) in the shadow; pieces behind them are posted, too. Any thread."""
        if first >= last:
            return
        piece_rows = self._binding.plan.piece_rows
        begin, end = np.searchsorted(piece_rows, [first, last - 1], side="right").tolist()
        while not self._done[begin : end + 1].all():
            if self._advance(begin, end):
                continue
            if self._stopped.is_set() or not go_on():
                self._stopped.set()
                return
            pause()

    def check(self) -> None:
        """Raise OfferChanged if the source has revoked the offer: its generation is read where it lies."""
        found = self._session.generation(self._attachment, Deadline.after(CHECK_S))
        check_generation(self.offer, found)

    def end(self) -> None:
        """Wait a moment for what is in flight; what then still is, is ended with the session."""
        deadline = Deadline.after(END_S)
        session = self._session
        with session.lock:
            while self._flying and not session.closed:
                if deadline.over or not self._landing_over():
                    session.close()
                else:
                    pause()
            self._flying.clear()
            session.readings -= not self._over
            self._over = True

    def _landing_over(self) -> bool:
        """Forget pieces that have landed; False where that cannot be known any more."""
        try:
            for piece in [p for p in self._flying if self._session.agent.done(self._binding.requests[p])]:
                del self._flying[piece]
        except Exception:  # of a connection that is gone: its reads end with the session
            return False
        return True

    def _advance(self, begin: int, end: int) -> bool:
        """Post reads as far as there are slots, and handle the pieces that have arrived. Returns whether any has."""
        with self._session.lock:
            arrived = self._post(begin, end)
            arrived += [p for p in self._flying if self._session.agent.done(self._binding.requests[p])]
            for piece in arrived:
                self._flying.pop(piece, None)
                self._copying.add(piece)
        for piece in arrived:
            self._copy_out(piece)
        return bool(arrived)

    def _copy_out(self, piece: int) -> None:
        first, last = int(self._copies[piece]), int(self._copies[piece + 1])
        if self._binding.landed is not None and first < last:
            self._binding.landed.run(first, last)
        with self._session.lock:
            self._copying.discard(piece)
            self._done[piece] = True

    def _post(self, begin: int, end: int) -> list[int]:
        """Post the pieces of a range, then those behind it, as far as there are slots; those that were there at once."""
        arrived: list[int] = []
        for piece in range(begin, len(self._done)):
            if len(self._flying) + len(arrived) >= SLOTS:
                break
            if piece in self._new and not self._slot_taken(piece, arrived):
                self._new.remove(piece)
                self._flying[piece] = None
                if self._session.agent.post(self._binding.requests[piece]):
                    arrived.append(piece)
                    del self._flying[piece]
            elif piece > end + SLOTS:
                break
            if piece >= end and arrived and not self._flying:
                break  # where a post is the read itself, what is posted ahead only leaves the caches again
        return arrived

    def _slot_taken(self, piece: int, arrived: Sequence[int]) -> bool:
        if self._binding.landed is None:
            return False
        others = (*self._flying, *arrived, *self._copying)
        return any(other % SLOTS == piece % SLOTS for other in others)
