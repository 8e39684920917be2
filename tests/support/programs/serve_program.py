"""`liveweight serve` with the echo engine in place of a model: the same program around it.

Run as `-m tests.support.programs.serve_program DIR ...`.

`kill -USR1` lets rank 1 be lost; a model directory called `slow` takes as long to start as nobody waits; `fault` cannot start.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from liveweight.cli import main
from liveweight.cli.commands import serve
from liveweight.engine.config import EngineConfig
from liveweight.errors import CheckpointInvalid, RankLost
from liveweight.observe.bus import Bus
from tests.support.engine.echo_engine import EchoEngine


def start(config: EngineConfig, bus: Bus) -> EchoEngine:
    """In place of the engine's own start."""
    del bus  # it takes no updates
    match Path(config.model).name:
        case "slow":
            print("starting", flush=True)  # noqa: T201
            threading.Event().wait(600)
        case "fault":
            raise CheckpointInvalid("fault: model.safetensors is cut off")
    engine = EchoEngine(config, context=100_000, pace_s=0.005)
    lost = RankLost("rank 1 ended with signal 9")
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=engine.fail, args=(lost,)).start())
    return engine


if __name__ == "__main__":
    serve._start = start
    main.run()
