"""An engine in a process of its own, as an API server is, with ranks that have consoles."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.ranks import Process
from liveweight.observe.bus import Bus
from tests.support.program import Console


def main(config: dict[str, Any]) -> None:
    """The config has the engine's, and the paths of the ranks' consoles."""
    console, bus = Console(), Bus()

    def launch(rank: int, end: socket.socket) -> Process:
        given = {"console": config["consoles"][rank], "stream": end.fileno(), "parent": os.getpid()}
        code = f"from tests.support.engine_rank_program import main; main({given!r})"
        return subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[end.fileno()], stdin=subprocess.DEVNULL
        )

    engine_config = msgspec.convert(config["engine"], EngineConfig)
    with (
        bus.subscribe(console.on_event),
        Engine(engine_config, launch=launch, bus=bus),
    ):
        console.say(ready="")
        while console.commands.get()["do"] != "stop":
            continue
