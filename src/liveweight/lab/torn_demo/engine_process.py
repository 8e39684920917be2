"""One side of the torn demo: the embedded engine behind HTTP, in a process of its own. Both sides run this program.

They differ in one setting: how new weights come in. Right, publishers reach the engine's leader. Left, a hook has moved the ranks' live
weights to memory that a trainer can write.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from liveweight.engine.config import EngineConfig
from liveweight.engine.serving.step_channel import StepChannel
from liveweight.errors import ChannelClosed, LiveWeightError
from liveweight.lab.torn_demo.processes import ChildMessage, Go, Served, run

if TYPE_CHECKING:
    from liveweight.engine.engine import Engine


class SideConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine."""

    engine: EngineConfig


def main(descriptor: int) -> None:
    """The process. An interrupt is how its end arrives while it starts."""
    with suppress(KeyboardInterrupt):
        run(descriptor, SideConfig, _serve)


def _serve(pipe: StepChannel[SideConfig | Go], config: SideConfig) -> None:
    """Serve on a port of its own until the pipe closes, which is as a SIGTERM: also while it starts, everything is released."""
    from liveweight.engine.engine import Engine
    from liveweight.server.server import bind

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_with, args=(pipe,), name="pipe", daemon=True).start()
    with bind("127.0.0.1", 0) as bound, Engine(config.engine) as engine:
        fault = asyncio.run(_until_told(engine, bound, pipe))
    if fault is not None:
        raise fault


def _end_with(pipe: StepChannel[SideConfig | Go]) -> None:
    """Hears the end of the pipe; the main thread only speaks on it."""
    with suppress(ChannelClosed):
        pipe.receive()
    os.kill(os.getpid(), signal.SIGTERM)


async def _until_told(
    engine: Engine, bound: socket.socket, pipe: StepChannel[SideConfig | Go]
) -> LiveWeightError | None:
    from prometheus_client import CollectorRegistry

    from liveweight.server.app import build_app
    from liveweight.server.request_guard import AccessRules
    from liveweight.server.server import Ending, ServerTimes, serve, url_of

    def ready() -> None:
        with suppress(ChannelClosed):
            pipe.send(ChildMessage("ready", served=Served(url=url_of(bound), pids=engine.pids)))

    ending = Ending()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.ask)
    app = build_app(engine, registry=CollectorRegistry(), access=AccessRules())
    times = ServerTimes(grace_s=0.0, tell_fault_s=0.0)
    return await serve(engine, app, bound, times, ready=ready, ending=ending)
