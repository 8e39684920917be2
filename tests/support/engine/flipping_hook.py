"""A hook that lets a rank flip one bit of its final norm, in live memory, whenever it is sent SIGUSR1."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

from liveweight.engine.models.model import Model

NAME = "tests.support.engine.flipping_hook:flip_when_told"
FLIPPED = "model.norm.weight"
changed: list[Model] = []
"""The rank's model, once the hook has run."""


def flip_when_told(model: Model) -> None:
    """Run after every change of the weights, so the tensor lies where it does then.

    A thread flips the bit. Python would run a handler in the main thread only when that next has something to do: a signal that comes just
    before the main thread waits for the scheduler would be lost for as long as it waits.
    """
    if changed:
        changed[:] = [model]
        return
    changed.append(model)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    threading.Thread(target=_flip, args=(reads,), name="flipping", daemon=True).start()


def _flip(signals: int) -> None:
    while heard := os.read(signals, 64):
        if heard.count(signal.SIGUSR1) % 2:
            ctypes.c_ubyte.from_address(changed[0].norm.weight.data_ptr()).value ^= 1
