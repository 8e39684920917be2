"""How a publisher reaches the engines that its user names: an address, a URL, a vLLM, or a replica of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from liveweight.integrations.vllm.engine import VllmEngine
from liveweight.rounds.replica import Replica, WireReplica
from liveweight.server.client import is_url, wire_address
from liveweight.wire.credentials import Secret

Engine: TypeAlias = str | VllmEngine | Replica
"""A leader's address, the URL of an engine that says its own, `vllm(...)`, or what drives one."""


def connect(
    engines: Sequence[Engine], *, secret: Secret, secret_file: Path | None, key: str | None
) -> list[Replica]:
    """The engines as they are driven; nobody is spoken to yet."""
    return [_one(engine, secret, secret_file, key) for engine in engines]


def _one(engine: Engine, secret: Secret, secret_file: Path | None, key: str | None) -> Replica:
    match engine:
        case VllmEngine():
            return engine.replica(secret, secret_file)
        case str() if is_url(engine):
            # One that is started again may listen elsewhere: whenever it is connected to, it is asked where.
            return WireReplica(
                "", secret, name=engine, found=lambda deadline: wire_address(engine, key, deadline)
            )
        case str():
            return WireReplica(engine, secret)
        case _:
            return engine
