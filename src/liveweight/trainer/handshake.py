"""The handshake with replicas: compares the manifests that they expect with the manifest that they will be offered.

Runs once, when a publisher is made, before the first round. Rounds are the coordinator's (rounds/coordinator).
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
from liveweight.spec.dtype import CASTABLE, DType
from liveweight.spec.manifest import Manifest, OptionalGroup, Version, compare
from liveweight.trainer.offers.port import OfferMaker
from liveweight.trainer.settings import PATIENCE
from liveweight.trainer.sources.renamed_source import for_engines
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.stacked_experts import checkpoint_manifest
from liveweight.transports.registry import Mode
from liveweight.wire.messages import ReplicaState
from liveweight.wire.sockets import host_towards

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """The manifest that all replicas expect, and its groups that every replica can do without. `boots` are the replicas' incarnations, in
    order; None for a replica that did not answer and that the quorum can do without. `serving`: what the first replica serves; `served`:
    what each one serves that answered."""

    expected: Manifest
    optional: tuple[OptionalGroup, ...]
    boots: tuple[str | None, ...] = ()
    serving: Version | None = None
    served: tuple[Version | None, ...] = ()


def handshake(replicas: Sequence[Replica], deadline: Deadline, quorum: int | None = None) -> HandshakeResult:
    """Get the manifest that all replicas expect, once their ranks have joined; it must be the same for all.

    Asks all replicas at once. If fewer than the quorum (None: all) answer in time, raises the first replica's error.
    """
    if not replicas:
        raise WrongState("without engines", "publish")
    patience = deadline if quorum is None else deadline.within(PATIENCE * deadline.remaining_s())
    with ThreadPoolExecutor(len(replicas)) as pool:
        answers = list(pool.map(lambda replica: get_state(replica, patience), replicas))
    states = [one for one in answers if isinstance(one, ReplicaState)]
    needed = len(replicas) if quorum is None else max(1, min(quorum, len(replicas)))
    if len(states) < needed:
        raise next(one for one in answers if not isinstance(one, ReplicaState))
    return HandshakeResult(
        expected=_agreed(replicas, answers),
        optional=tuple(group for group in states[0].optional if all(group in one.optional for one in states)),
        boots=tuple(one.boot if isinstance(one, ReplicaState) else None for one in answers),
        serving=states[0].serving,
        served=tuple(one.serving for one in states),
    )


def _agreed(replicas: Sequence[Replica], answers: Sequence[ReplicaState | LiveWeightError]) -> Manifest:
    """The manifest of the replicas that answered. Raises ManifestMismatch if two differ."""
    answered = [
        (r.name, one.expected)
        for r, one in zip(replicas, answers, strict=True)
        if isinstance(one, ReplicaState)
    ]
    first, expected = answered[0]
    for name, other in answered[1:]:
        if other.names_digest() != expected.names_digest():
            raise ManifestMismatch([f"{first} and {name} expect different tensors"])
    return expected


def check_arguments(
    engines: Sequence[object],
    address: str | None,
    dtype: object,
    offer: OfferKind,
    *,
    ranked: bool = False,
    modes: int = 1,
) -> None:
    """Refuse arguments of a publisher that contradict each other. `ranked`: the trainer has several ranks; `modes`: how many transfer modes
    it names."""
    if modes > 1 and (ranked or address is not None):
        who = "a trainer of several ranks" if ranked else "a source that engines pull from"
        raise Refused(
            f"{who} has one transfer mode: several are tried in rounds that one process drives alone"
        )
    if ranked and (address is not None or not engines):
        raise Refused(
            "a trainer of several ranks drives its engines: name them; engines cannot pull its versions"
        )
    if address is not None and engines and offer != "frozen":
        raise Refused(
            f"engines that pull beside the named ones read frozen offers, and these would be {offer}"
        )
    if dtype is not None and (engines or address is None):
        raise Refused("a dtype is for a source that has no engines: engines say which they expect")


def handshake_without_engines(source: Source, dtype: str | None) -> HandshakeResult:
    """The result for a source without engines to ask: the source's own tensors as checkpoints name them. Floats are in `dtype`, if it is
    given; other tensors keep their dtypes."""
    own, wanted = checkpoint_manifest(for_engines(source, None).manifest()), offered_dtype(dtype)
    if wanted is None:
        return HandshakeResult(expected=own, optional=())
    tensors = [replace(spec, dtype=wanted) if spec.dtype in CASTABLE else spec for spec in own]
    return HandshakeResult(expected=Manifest(tensors=tuple(tensors)), optional=())


def offered_dtype(dtype: str | None) -> DType | None:
    """What floats are offered as; None: as they are. Refused for a dtype that no float is cast to."""
    known = {castable.value: castable for castable in CASTABLE}
    if dtype is None:
        return None
    wanted = known.get(dtype.removeprefix("torch."))
    if wanted is None:
        raise Refused(f"weights cannot be offered as {dtype}, only as {', '.join(sorted(known))}")
    return wanted


def own_host(given: str | None, chosen: Mode, replicas: Sequence[Replica], address: str | None) -> str | None:
    """The address of this host for ranks to connect to: that of the interface towards the first engine on another host, or towards the
    address where engines pull."""
    if given is not None or chosen.reach != "any host":
        return given
    towards = far_address([*replicas, *([] if address is None else [address])])
    return None if towards is None else host_towards(towards)


def far_address(reached: Sequence[Replica | str]) -> str | None:
    """The first of these addresses that may be on another host. A replica's address is where its leader listens, or else its name."""
    found = [one if isinstance(one, str) else getattr(one, "address", one.name) for one in reached]
    return next((address for address in found if address.startswith("tcp://")), None)


def describe_to(
    replicas: Sequence[Replica], offers: OfferMaker, agreed: HandshakeResult, deadline: Deadline
) -> None:
    """Compare manifests before training starts, here and at every replica that answered. Rounds then refer to the manifest by its name."""
    body = offers.description()
    compare(
        agreed.expected,
        body.manifest,
        (*agreed.optional, *([] if body.kept is None else [body.kept.group()])),
    )
    for replica in (one for one, boot in zip(replicas, agreed.boots, strict=True) if boot is not None):
        _raising_error(functools.partial(replica.describe, body, deadline))


def _raising_error(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except ReplicaRefused as refused:
        raise refused.to_error() from None
