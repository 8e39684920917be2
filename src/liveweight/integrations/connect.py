"""Turns the engines that a user names (an address, a URL, `vllm(...)` or a Replica) into replicas that a publisher drives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from liveweight.integrations.vllm.engine import VllmEngine
from liveweight.rounds.replica import Replica, WireReplica
from liveweight.server.client import is_url, wire_address
from liveweight.wire.credentials import Secret

Engine: TypeAlias = str | VllmEngine | Replica
"""A leader's address, the URL of an engine (whose server knows the leader's address), `vllm(...)`, or a Replica."""


def connect(
    engines: Sequence[Engine], *, secret: Secret, secret_file: Path | None, key: str | None
) -> list[Replica]:
    """Return one Replica per engine. Opens no connection yet."""
    return [_connect_one(engine, secret, secret_file, key) for engine in engines]


def _connect_one(engine: Engine, secret: Secret, secret_file: Path | None, key: str | None) -> Replica:
    match engine:
        case VllmEngine():
            return engine.replica(secret, secret_file)
        case str() if is_url(engine):
            # A restarted engine may listen at another address: ask its server before every connection.
            return WireReplica(
                "", secret, name=engine, locate=lambda deadline: wire_address(engine, key, deadline)
            )
        case str():
            return WireReplica(engine, secret)
        case _:
            return engine
