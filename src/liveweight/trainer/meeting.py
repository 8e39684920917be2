"""Meeting replicas: what they expect, and what they will be offered, compared before the first round.

Called once, when a publisher is made. Rounds are drive's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from liveweight.errors import ManifestMismatch, Refused, WrongState
from liveweight.observe.events import OfferKind
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, OptionalGroup, compare
from liveweight.trainer.experts import checkpoint_manifest
from liveweight.trainer.freeze import CASTABLE
from liveweight.trainer.offering import Offering
from liveweight.trainer.replica import Replica, ReplicaRefused
from liveweight.trainer.source import Source
from liveweight.transports.registry import Mode
from liveweight.wire.sockets import host_towards

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What all replicas expect, and the groups of it that every one of them can do without."""

    expected: Manifest
    optional: tuple[OptionalGroup, ...]


def meet_replicas(replicas: Sequence[Replica], deadline: Deadline) -> Met:
    """What all replicas expect, once their ranks have joined; they must expect the same."""
    expected: Manifest | None = None
    optional: tuple[OptionalGroup, ...] = ()
    for replica in replicas:
        standing = _asked(functools.partial(replica.standing, deadline))
        if expected is None:
            expected, optional = standing.expected, standing.optional
        elif expected.names_digest() != standing.expected.names_digest():
            raise ManifestMismatch([f"{replicas[0].name} and {replica.name} expect different tensors"])
        optional = tuple(group for group in optional if group in standing.optional)
    if expected is None:
        raise WrongState("without engines", "publish")
    return Met(expected=expected, optional=optional)


def check_terms(
    engines: Sequence[object], address: str | None, dtype: object, offer: OfferKind, *, ranked: bool = False
) -> None:
    """Refuse what contradicts itself about engines that ask. `ranked`: the trainer has several ranks."""
    if ranked and (address is not None or not engines):
        raise Refused(
            "a trainer of several ranks drives its engines: name them; they cannot ask for its versions"
        )
    if address is not None and engines and offer != "frozen":
        raise Refused(f"those who ask beside engines read frozen offers, and these would be {offer}")
    if dtype is not None and (engines or address is None):
        raise Refused("a dtype is for a source that has no engines: they say which they expect")


def own_terms(source: Source, dtype: str | None) -> Met:
    """What is offered where no engine says what it expects: the source's tensors as checkpoints name them, in their dtypes or,
    floats, in that one."""
    own, known = checkpoint_manifest(source.manifest()), {castable.value: castable for castable in CASTABLE}
    if dtype is None:
        return Met(expected=own, optional=())
    wanted = known.get(dtype.removeprefix("torch."))
    if wanted is None:
        raise Refused(f"weights cannot be offered as {dtype}, only as {', '.join(sorted(known))}")
    tensors = [replace(spec, dtype=wanted) if spec.dtype in CASTABLE else spec for spec in own]
    return Met(expected=Manifest(tensors=tuple(tensors)), optional=())


def own_host(given: str | None, chosen: Mode, replicas: Sequence[Replica], address: str | None) -> str | None:
    """The address of this host that ranks are told: the one on the way to the first engine on another, or where engines ask."""
    if given is not None or chosen.reach != "any host":
        return given
    names = [replica.name for replica in replicas] + ([] if address is None else [address])
    return next((host_towards(name) for name in names if name.startswith("tcp://")), None)


def describe_to(replicas: Sequence[Replica], offers: Offering, met: Met, deadline: Deadline) -> None:
    """Compare manifests before training starts: here for the names, and at every replica so that rounds can refer to it."""
    compare(met.expected, offers.manifest, met.optional)
    for replica in replicas:
        _asked(functools.partial(replica.describe, offers.structure, offers.manifest, deadline))


def _asked(question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except ReplicaRefused as refused:
        raise refused.to_error() from None
