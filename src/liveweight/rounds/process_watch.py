"""A watch over processes of this host, by process id: learns that a process has ended without a message from it."""

from __future__ import annotations

import os
import select
from typing import Generic, TypeVar

from liveweight.wire.host_identity import this_host

Who = TypeVar("Who")


class ProcessWatch(Generic[Who]):
    """For one thread. Ends with `close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Who, int] = {}

    def watch(self, who: Who, host: str, pid: int) -> None:
        """Watch that process instead of the previous one of `who`. A process of another host is not watched: only deadlines apply to it."""
        self.forget(who)
        if not host or host != this_host():
            return
        try:
            self._descriptors[who] = os.pidfd_open(pid)
        except OSError:
            return  # it has ended already, and its channel says so

    def forget(self, who: Who) -> None:
        """Stop watching that process."""
        descriptor = self._descriptors.pop(who, None)
        if descriptor is not None:
            os.close(descriptor)

    def ended(self) -> list[Who]:
        """The processes that have ended since the last call; each is returned once."""
        poll = select.poll()
        for descriptor in self._descriptors.values():
            poll.register(descriptor, select.POLLIN)
        over = {descriptor for descriptor, _ in poll.poll(0)}
        gone = [who for who, descriptor in self._descriptors.items() if descriptor in over]
        for who in gone:
            self.forget(who)
        return gone

    def close(self) -> None:
        """Stop watching all processes."""
        for who in list(self._descriptors):
            self.forget(who)
