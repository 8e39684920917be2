"""A hook that lets a rank flip one bit of its final norm, in live memory, whenever it is sent SIGUSR1."""

from __future__ import annotations

import ctypes
import signal

from liveweight.engine.models.model import Model

NAME = "tests.support.engine.flipping_hook:flip_when_told"
FLIPPED = "model.norm.weight"


def flip_when_told(model: Model) -> None:
    """Run after every change of the weights, so the tensor lies where it does then."""

    def flip(*_: object) -> None:
        ctypes.c_ubyte.from_address(model.norm.weight.data_ptr()).value ^= 1

    signal.signal(signal.SIGUSR1, flip)
