"""A publisher for benchmarks: of a module that others can read, to the replicas at some addresses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from liveweight.rounds.replica import WireReplica
from liveweight.trainer.local_publisher import ConnectedPublisher, publishing_to
from liveweight.trainer.offers.live import SharedModule
from liveweight.trainer.sources.in_memory import ModuleSource
from liveweight.transports.packing_source import RingSettings
from liveweight.wire.credentials import load_or_create_secret


def publishing(
    shared: SharedModule,
    *,
    addresses: Sequence[str],
    directory: Path,
    timeout_s: float,
    stack: ExitStack,
    ring: RingSettings | None = None,
    transfer_mode: str = "ipc",
    files: Path | None = None,
) -> ConnectedPublisher:
    """Connect a publisher to the replicas, whose secret lies in the directory. Everything is closed with the stack."""
    secret = load_or_create_secret(directory / "secret")
    return publishing_to(
        [WireReplica(address, secret) for address in addresses],
        ModuleSource(shared.module),
        name="bench",
        directory=directory,
        secret=secret,
        timeout_s=timeout_s,
        stack=stack,
        shared=shared,
        ring=ring,
        transfer_mode=transfer_mode,
        files=files,
    )
