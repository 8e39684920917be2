"""A watch over processes of this host, by their ids: who has ended is known at once, without a message."""

from __future__ import annotations

import os
import select
from typing import Generic, TypeVar

from liveweight.wire.host_identity import this_host

Who = TypeVar("Who")


class ProcessWatch(Generic[Who]):
    """For one thread. Ends with `close`."""

    def __init__(self) -> None:
        self._over: dict[Who, int] = {}

    def over(self, who: Who, host: str, pid: int) -> None:
        """Watch over that process in the place of the one before. One that cannot be seen from here has only its deadlines."""
        self.forget(who)
        if not host or host != this_host():
            return
        try:
            self._over[who] = os.pidfd_open(pid)
        except OSError:
            return  # it has ended already, and its channel says so

    def forget(self, who: Who) -> None:
        """It matters no more."""
        descriptor = self._over.pop(who, None)
        if descriptor is not None:
            os.close(descriptor)

    def ended(self) -> list[Who]:
        """Those that have ended since; each is told once."""
        poll = select.poll()
        for descriptor in self._over.values():
            poll.register(descriptor, select.POLLIN)
        over = {descriptor for descriptor, _ in poll.poll(0)}
        gone = [who for who, descriptor in self._over.items() if descriptor in over]
        for who in gone:
            self.forget(who)
        return gone

    def close(self) -> None:
        """Watch over nobody."""
        for who in list(self._over):
            self.forget(who)
