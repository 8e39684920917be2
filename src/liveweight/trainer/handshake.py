"""Meeting replicas: what they expect, and what they will be offered, compared before the first round.

Called once, when a publisher is made. Rounds are drive's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from liveweight.errors import LiveWeightError, ManifestMismatch, Refused, WrongState
from liveweight.observe.events import OfferKind
from liveweight.rounds.fleet import get_state
from liveweight.rounds.replica import Replica, ReplicaRefused
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, OptionalGroup, Version, compare
from liveweight.trainer.offers.freeze import CASTABLE
from liveweight.trainer.offers.port import OfferMaker
from liveweight.trainer.settings import PATIENCE
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.stacked_experts import checkpoint_manifest
from liveweight.transports.registry import Mode
from liveweight.wire.messages import ReplicaState
from liveweight.wire.sockets import host_towards

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """What all replicas expect, and the groups of it that every one of them can do without. `boots` are their incarnations, in order;
    None for one that was not met, which the quorum can do without. `serving` is what the first
    of them serves."""

    expected: Manifest
    optional: tuple[OptionalGroup, ...]
    boots: tuple[str | None, ...] = ()
    serving: Version | None = None


def handshake(replicas: Sequence[Replica], deadline: Deadline, quorum: int | None = None) -> HandshakeResult:
    """What all replicas expect, once their ranks have joined; they must expect the same.

    Asked all at once. Where fewer than the quorum (None: all) can be asked in time, the first one's error is raised.
    """
    if not replicas:
        raise WrongState("without engines", "publish")
    patience = deadline if quorum is None else deadline.within(PATIENCE * deadline.remaining_s())
    with ThreadPoolExecutor(len(replicas)) as pool:
        said = list(pool.map(lambda replica: get_state(replica, patience), replicas))
    standings = [one for one in said if isinstance(one, ReplicaState)]
    needed = len(replicas) if quorum is None else max(1, min(quorum, len(replicas)))
    if len(standings) < needed:
        raise next(one for one in said if not isinstance(one, ReplicaState))
    return HandshakeResult(
        expected=_agreed(replicas, said),
        optional=tuple(
            group for group in standings[0].optional if all(group in one.optional for one in standings)
        ),
        boots=tuple(one.boot if isinstance(one, ReplicaState) else None for one in said),
        serving=standings[0].serving,
    )


def _agreed(replicas: Sequence[Replica], said: Sequence[ReplicaState | LiveWeightError]) -> Manifest:
    """What those that were met expect."""
    met = [
        (r.name, one.expected) for r, one in zip(replicas, said, strict=True) if isinstance(one, ReplicaState)
    ]
    first, expected = met[0]
    for name, other in met[1:]:
        if other.names_digest() != expected.names_digest():
            raise ManifestMismatch([f"{first} and {name} expect different tensors"])
    return expected


def check_terms(
    engines: Sequence[object],
    address: str | None,
    dtype: object,
    offer: OfferKind,
    *,
    ranked: bool = False,
    modes: int = 1,
) -> None:
    """Refuse what contradicts itself about engines that ask. `ranked`: the trainer has several ranks; `modes`: so many transfer modes."""
    if modes > 1 and (ranked or address is not None):
        who = "a trainer of several ranks" if ranked else "a source that engines ask"
        raise Refused(
            f"{who} has one transfer mode: several are tried in rounds that one process drives alone"
        )
    if ranked and (address is not None or not engines):
        raise Refused(
            "a trainer of several ranks drives its engines: name them; they cannot ask for its versions"
        )
    if address is not None and engines and offer != "frozen":
        raise Refused(f"those who ask beside engines read frozen offers, and these would be {offer}")
    if dtype is not None and (engines or address is None):
        raise Refused("a dtype is for a source that has no engines: they say which they expect")


def own_terms(source: Source, dtype: str | None) -> HandshakeResult:
    """What is offered where no engine says what it expects: the source's tensors as checkpoints name them, in their dtypes or,
    floats, in that one."""
    own, known = checkpoint_manifest(source.manifest()), {castable.value: castable for castable in CASTABLE}
    if dtype is None:
        return HandshakeResult(expected=own, optional=())
    wanted = known.get(dtype.removeprefix("torch."))
    if wanted is None:
        raise Refused(f"weights cannot be offered as {dtype}, only as {', '.join(sorted(known))}")
    tensors = [replace(spec, dtype=wanted) if spec.dtype in CASTABLE else spec for spec in own]
    return HandshakeResult(expected=Manifest(tensors=tuple(tensors)), optional=())


def own_host(given: str | None, chosen: Mode, replicas: Sequence[Replica], address: str | None) -> str | None:
    """The address of this host that ranks are told: the one on the way to the first engine on another, or where engines ask."""
    if given is not None or chosen.reach != "any host":
        return given
    towards = far_address([*replicas, *([] if address is None else [address])])
    return None if towards is None else host_towards(towards)


def far_address(reached: Sequence[Replica | str]) -> str | None:
    """The first of these addresses that may be another host's; a replica's is where its leader listens, or else its name."""
    found = [one if isinstance(one, str) else getattr(one, "address", one.name) for one in reached]
    return next((address for address in found if address.startswith("tcp://")), None)


def describe_to(
    replicas: Sequence[Replica], offers: OfferMaker, met: HandshakeResult, deadline: Deadline
) -> None:
    """Compare manifests before training starts: here for the names, and at every replica that was met so that rounds can refer to it."""
    compare(met.expected, offers.manifest, met.optional)
    for replica in (one for one, boot in zip(replicas, met.boots, strict=True) if boot is not None):
        _asked(functools.partial(replica.describe, offers.structure, offers.manifest, deadline))


def _asked(question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except ReplicaRefused as refused:
        raise refused.to_error() from None
