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
    """The engine's configuration."""

    engine: EngineConfig


def main(descriptor: int) -> None:
    """The process's main function. During the start, SIGTERM raises KeyboardInterrupt."""
    with suppress(KeyboardInterrupt):
        run(descriptor, SideConfig, _serve)


def _serve(channel: StepChannel[SideConfig | Go], config: SideConfig) -> None:
    """Serve on a free port until the channel closes, which raises SIGTERM: even during the start, everything is released."""
    from liveweight.engine.engine import Engine
    from liveweight.server.server import bind

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_when_closed, args=(channel,), name="channel", daemon=True).start()
    with bind("127.0.0.1", 0) as bound, Engine(config.engine) as engine:
        fault = asyncio.run(_serve_until_closed(engine, bound, channel))
    if fault is not None:
        raise fault


def _end_when_closed(channel: StepChannel[SideConfig | Go]) -> None:
    """Wait until the channel closes. This thread alone receives; the main thread only sends."""
    with suppress(ChannelClosed):
        channel.receive()
    os.kill(os.getpid(), signal.SIGTERM)


async def _serve_until_closed(
    engine: Engine, bound: socket.socket, channel: StepChannel[SideConfig | Go]
) -> LiveWeightError | None:
    from prometheus_client import CollectorRegistry

    from liveweight.server.app import build_app
    from liveweight.server.request_guard import AccessRules
    from liveweight.server.server import ServerTimes, Shutdown, serve, url_of

    def ready() -> None:
        with suppress(ChannelClosed):
            channel.send(ChildMessage("ready", served=Served(url=url_of(bound), pids=engine.pids)))

    shutdown = Shutdown()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.request)
    app = build_app(engine, registry=CollectorRegistry(), access=AccessRules())
    times = ServerTimes(grace_s=0.0, tell_fault_s=0.0)
    return await serve(engine, app, bound, times, ready=ready, shutdown=shutdown)
