"""From what a program calls its engines to the replicas that a publisher drives: leaders' addresses, or URLs of engines that say theirs."""

from __future__ import annotations

from collections.abc import Sequence

from liveweight.control.client import is_url, wire_address
from liveweight.trainer.replica import Replica, WireReplica
from liveweight.wire.credentials import Secret


def reached(engines: Sequence[str | Replica], secret: Secret, key: str | None) -> list[Replica]:
    """One replica for each; nobody is spoken to yet."""
    return [_one(engine, secret, key) if isinstance(engine, str) else engine for engine in engines]


def _one(engine: str, secret: Secret, key: str | None) -> Replica:
    if not is_url(engine):
        return WireReplica(engine, secret)
    # One that is started again may listen elsewhere: whenever it is connected to, it is asked where.
    return WireReplica("", secret, name=engine, found=lambda deadline: wire_address(engine, key, deadline))
