"""A publisher for one host with one transfer mode, composed with defaults: for benchmarks and integrations."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.kernels import choose
from liveweight.observe.bus import Bus
from liveweight.rounds.replica import Replica
from liveweight.spec.deadline import Deadline
from liveweight.trainer.handshake import describe_to, handshake
from liveweight.trainer.offers.live import SharedModule
from liveweight.trainer.offers.single_source import SingleSourceOffers
from liveweight.trainer.offers.transfer_fallback import OpenMode, TransferFallback
from liveweight.trainer.publisher import RoundPublisher
from liveweight.trainer.settings import PublisherSettings
from liveweight.trainer.sources.source import Source
from liveweight.transports.packing_source import RingSettings
from liveweight.transports.registry import mode
from liveweight.wire.credentials import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedPublisher:
    """A publisher whose handshake with its replicas is done, and the offers it makes."""

    publisher: RoundPublisher
    offers: SingleSourceOffers


def publishing_to(
    replicas: Sequence[Replica],
    source: Source,
    *,
    name: str,
    directory: Path,
    secret: Secret,
    timeout_s: float,
    stack: ExitStack,
    shared: SharedModule | None = None,
    ring: RingSettings | None = None,
    transfer_mode: str = "ipc",
    files: Path | None = None,
) -> ConnectedPublisher:
    """Shake hands with the replicas and return the publisher; the stack closes everything. `shared`: the module, if ranks can read its
    parameters where they lie. A mode that writes files writes them to `files`, if it is given."""
    chosen = mode(transfer_mode)
    transport_source = chosen.transport_source(
        files if files is not None and chosen.reach == "files" else directory, secret
    )
    fallback = TransferFallback([OpenMode(mode=chosen, transport_source=transport_source)], Bus())
    deadline = Deadline.after(timeout_s)
    stack.callback(fallback.close)
    agreed = handshake(replicas, deadline)
    offers = SingleSourceOffers(
        source=source,
        expected=agreed.expected,
        fallback=fallback,
        kernels=choose().kernels,
        shared=shared,
        threads=os.cpu_count() or 1,
        bus=Bus(),
        ring=ring,
    )
    describe_to(replicas, offers, agreed, deadline)
    publisher = RoundPublisher(
        name=name,
        run=secrets.token_hex(4),
        replicas=replicas,
        offers=offers,
        settings=PublisherSettings(timeout_s=timeout_s),
    )
    return ConnectedPublisher(publisher=stack.enter_context(publisher), offers=offers)
