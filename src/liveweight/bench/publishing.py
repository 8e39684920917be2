"""A publisher for benchmarks: the parts that a program composes, on one host, over shared memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.kernels import choose
from liveweight.observe.bus import Bus
from liveweight.spec.deadline import Deadline
from liveweight.trainer.live import SharedModule
from liveweight.trainer.meeting import describe_to, meet_replicas
from liveweight.trainer.offers import Offers
from liveweight.trainer.publisher import Publisher
from liveweight.trainer.replica import WireReplica
from liveweight.trainer.settings import PublisherSettings
from liveweight.trainer.sources import ModuleSource
from liveweight.trainer.ways import Way, Ways
from liveweight.transports.registry import mode
from liveweight.transports.stock import RingSettings
from liveweight.wire.credentials import load_or_create_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """A publisher that has met its replicas, and the offers it makes."""

    publisher: Publisher
    offers: Offers


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
) -> Publishing:
    """Meet the replicas at their addresses, whose secret lies in the directory; everything ends with the stack.

    A mode that writes files writes them to `files`, where it is given.
    """
    secret, chosen = load_or_create_secret(directory / "secret"), mode(transfer_mode)
    outlet = chosen.outlet(files if files is not None and chosen.reach == "files" else directory, secret)
    ways = Ways([Way(mode=chosen, outlet=outlet)], Bus())
    stack.callback(ways.close)
    replicas, deadline = [WireReplica(address, secret) for address in addresses], Deadline.after(timeout_s)
    met = meet_replicas(replicas, deadline)
    offers = Offers(
        source=ModuleSource(shared.module),
        expected=met.expected,
        ways=ways,
        kernels=choose().kernels,
        shared=shared,
        threads=os.cpu_count() or 1,
        bus=Bus(),
        ring=ring,
    )
    describe_to(replicas, offers, met, deadline)
    publisher = Publisher(
        name="bench",
        run=secrets.token_hex(4),
        replicas=replicas,
        offers=offers,
        settings=PublisherSettings(timeout_s=timeout_s),
    )
    return Publishing(publisher=stack.enter_context(publisher), offers=offers)
