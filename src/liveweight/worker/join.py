"""How a rank joins its leader, and what it reports about the weights that it joins with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from liveweight.errors import WrongState
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, OptionalGroup, Version
from liveweight.wire.channel import Channel
from liveweight.wire.host_identity import this_host
from liveweight.wire.messages import Join, Joined, Message, Refusal
from liveweight.worker.targets.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinContent:
    """What is known of the weights that a rank joins with: digests of its placements, 16 bytes each, and the version's manifest with
    digests, which one rank sends for all."""

    lanes: bytes
    manifest: Manifest | None = None


def join(
    channel: Channel[Message],
    *,
    rank: int,
    target: Target,
    serving: Version | None,
    content: JoinContent | None = None,
    optional: Sequence[OptionalGroup] = (),
    in_place: bool = False,
    met: str = "",
    deadline: Deadline,
) -> Joined:
    """Join the leader. Raises the leader's refusal."""
    body = Join(
        rank=rank,
        host=this_host(),
        pid=os.getpid(),
        layout=target.layout,
        serving=serving,
        optional=tuple(optional),
        lanes=None if content is None else content.lanes,
        manifest=None if content is None else content.manifest,
        in_place=in_place,
        met=met,
    )
    match channel.request(body, deadline, f"the leader to take rank {rank} in"):
        case Joined() as joined:
            return joined
        case Refusal(fault=fault):
            raise fault.to_error()
        case other:
            raise WrongState("joining", type(other).__name__)
