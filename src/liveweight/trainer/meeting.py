"""Meeting replicas: what they expect, and what they will be offered, compared before the first round.

Called once, when a publisher is made. Rounds are drive's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from liveweight.errors import ManifestMismatch, WrongState
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, compare
from liveweight.trainer.offers import Offers
from liveweight.trainer.replica import Replica, ReplicaRefused

Answer = TypeVar("Answer")


def meet_replicas(replicas: Sequence[Replica], deadline: Deadline) -> Manifest:
    """What all replicas expect, once their ranks have joined; they must expect the same."""
    expected: Manifest | None = None
    for replica in replicas:
        standing = _asked(functools.partial(replica.standing, deadline))
        if expected is None:
            expected = standing.expected
        elif expected.names_digest() != standing.expected.names_digest():
            raise ManifestMismatch([f"{replicas[0].name} and {replica.name} expect different tensors"])
    if expected is None:
        raise WrongState("without engines", "publish")
    return expected


def describe_to(replicas: Sequence[Replica], offers: Offers, expected: Manifest, deadline: Deadline) -> None:
    """Compare manifests before training starts: here for the names, and at every replica so that rounds can refer to it."""
    compare(expected, offers.manifest)
    for replica in replicas:
        _asked(functools.partial(replica.describe, offers.structure, offers.manifest, deadline))


def _asked(question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except ReplicaRefused as refused:
        raise refused.to_error() from None
