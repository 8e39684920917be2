"""A rank of the embedded engine. Forked from the zygote, standard input is its end of the stream.

With a console it reports the moments of its part in rounds to the test, and holds there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from pathlib import Path
from typing import Any

import liveweight.engine.models.model
import liveweight.engine.rank.checkpoint_loading
from liveweight.engine.rank import process
from liveweight.engine.rank.snapshot_writing import RankSnapshotWriter
from liveweight.observe.bus import Bus
from liveweight.worker.targets.torch_target import TensorTarget
from tests.support.programs.program import Console

del liveweight
HOLD = f"{__name__}:hold"
"""The hook in which a rank can be held."""
consoles: list[Console] = []


def main(config: dict[str, Any]) -> None:
    """Be a rank until the stream ends, with the variables that it was given.

    `console` is where the test listens, `gate` where it holds the rank's snapshots; `stream` and `parent` are for a rank that the zygote
    did not fork.
    """
    os.environ.update(config.get("environ", {}))
    if "gate" in config:
        hold_writing(Path(config["gate"]))
    stream, parent = config.get("stream"), config.get("parent")
    if stream is None:
        stream = os.dup(0)
    if "console" not in config:
        process.main(stream, parent=parent)
        return
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(config["console"])
        console = Console(link.makefile("r"), link.makefile("w"))
        consoles.append(console)
        console.at_once["damage"] = damage
        console.send(pid=os.getpid())
        bus = Bus()
        with bus.subscribe(console.on_event):
            process.main(stream, parent=parent, bus=bus)


def hold_writing(gate: Path) -> None:
    """Hold the rank in the middle of a snapshot, wherever tests/support/engine/elastic's gate is shut."""

    def stand(self: RankSnapshotWriter, size_bytes: int) -> None:
        del self, size_bytes
        if (gate / "shut").exists():
            (gate / "shut").unlink()
            (gate / "reached").write_text("1")
            with (gate / "go").open() as go:
                go.read(1)

    RankSnapshotWriter._wait_for_turn = stand  # type: ignore[method-assign]


def hold(model: object) -> None:
    """The hook: a moment."""
    del model
    consoles[0].moment("Hook")


def damage() -> None:
    """Flip one bit of the shadow."""
    target = next(found for found in gc.get_objects() if isinstance(found, TensorTarget))
    ctypes.c_ubyte.from_address(target.shadow()[0].address).value ^= 1
