"""The base of all messages, and the refusal, which may be sent instead of any reply."""

from __future__ import annotations

import msgspec

from liveweight.errors import LiveWeightError
from liveweight.spec.manifest import Version
from liveweight.wire.messages.values import Fault, fault_of


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class's name."""


class Refusal(Body, frozen=True):
    """Instead of any reply: the request had no effect, for this reason; what serves meanwhile."""

    fault: Fault
    serving: Version | None = None


def refuse_call(error: LiveWeightError) -> Refusal:
    """The answer to a call whose message could not be decoded (`Listener(refuse=)`)."""
    return Refusal(fault=fault_of(error, step="decode"))
