"""An engine in a process of its own, as an API server is, with ranks that have consoles."""

from __future__ import annotations

from typing import Any

import msgspec

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.observe.bus import Bus
from tests.support.processes.spare_ranks import spare_ranks
from tests.support.programs.program import Console


def main(config: dict[str, Any]) -> None:
    """The config has the engine's, and the paths of the ranks' consoles."""
    launch = spare_ranks({"console": path} for path in config["consoles"])
    console, bus = Console(), Bus()
    engine_config = msgspec.convert(config["engine"], EngineConfig)
    with (
        bus.subscribe(console.on_event),
        Engine(engine_config, launch=launch, bus=bus),
    ):
        console.send(ready="")
        while console.commands.get()["do"] != "stop":
            continue
