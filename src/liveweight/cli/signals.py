"""Signals that end a program without interrupting it anywhere: a thread reads them, and calls `stop`."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liveweight.lab.demo.stopping import Stop

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """In this block, Ctrl-C and its like call `stop` on a thread of their own, since a handler must not take locks. Main thread only."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    listening = threading.Thread(target=_listen, args=(ours, stop), name="signals")
    with ours, theirs:
        listening.start()
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            theirs.shutdown(socket.SHUT_RDWR)
            listening.join()


def _listen(end: socket.socket, stop: Stop) -> None:
    while numbers := end.recv(64):
        if any(number in numbers for number in ENDING):
            stop.stop()
