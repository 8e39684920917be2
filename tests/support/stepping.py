"""A receiver in this process, which steps through boundaries in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import liveweight as lw
from liveweight.errors import Torn
from liveweight.observe.bus import Bus


@contextmanager
def serving(
    tensors: dict[str, torch.Tensor], directory: Path, bus: Bus | None = None, **options: Any
) -> Iterator[str]:
    """The address of a replica of one rank that holds these tensors. It goes on stepping while it is torn."""
    stop = threading.Event()
    with lw.Receiver(
        tensors, address=f"ipc://{directory}/engine.sock", secret=directory / "secret", bus=bus, **options
    ) as receiver:
        stepping = threading.Thread(target=lambda: _step(receiver, stop))
        stepping.start()
        try:
            yield receiver.address
        finally:
            stop.set()
            stepping.join()


def _step(receiver: lw.Receiver, stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(Torn):
            receiver.at_boundary(idle_s=0.01)


def engine() -> dict[str, torch.Tensor]:
    """What a small engine holds."""
    return {"w": torch.zeros(4, 3), "b": torch.zeros(3)}


def publisher(source: object, address: str, directory: Path, **options: object) -> lw.Publisher:
    """A publisher for the replica at that address; give `timeout_s` where 20 seconds are not what is meant."""
    return lw.Publisher(
        source,
        engines=[address],
        secret=directory / "secret",
        directory=directory / "trainer",
        **({"timeout_s": 20.0} | options),  # type: ignore[arg-type]
    )
