"""The rank half of `gdr` and `rdma`: reads the regions that the rank owns out of a source's arenas, one-sided.

Owns the session and what is kept in it: attachments with their plans and bindings. After a failure nothing of it is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Self, TypeAlias

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, DeadlineExceeded, LiveWeightError, MessageInvalid, Refused
from liveweight.observe.events import OfferKind
from liveweight.plan.copies import CopyPlans
from liveweight.plan.reads import ReadPlan, plan_reads
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.transports.attach import ask_source
from liveweight.transports.attachment_cache import evict_oldest
from liveweight.transports.nixl.arena_location import location_from
from liveweight.transports.nixl.reading import NixlReading
from liveweight.transports.nixl.session import NixlAttachment, NixlBinding, NixlSession
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Message
from liveweight.wire.messages.values import Offer

PROBE_S = 2.0
"""How long a source that was read before may take to answer; then it is attached to anew."""
_ATTACHMENTS_KEPT = 4
_BINDINGS_KEPT = 4
_PLANS_KEPT = 4

_Key: TypeAlias = tuple[str, str, OfferKind]


class NixlReader:
    """Reads offers of sources on any host. One per rank, used by its staging thread. `direct`: reads land in the shadow itself."""

    def __init__(
        self,
        secret: Secret,
        kernels: Kernels,
        *,
        name: str,
        direct: bool,
        device: Device | None = None,
        limits: WireLimits | None = None,
    ) -> None:
        self._secret, self._kernels, self._name, self._direct = secret, kernels, name, direct
        self._device = CPU if device is None else device
        self._limits = limits or WireLimits()
        self._codec: Codec[Message] = Codec(Message)
        self._copies = CopyPlans()
        self._plans: dict[tuple[str, str], ReadPlan] = {}
        self._session: NixlSession | None = None
        self._attachments: dict[_Key, NixlAttachment] = {}
        self._retired: list[NixlSession] = []
        self.requests = 0
        """How often a source was asked where its memory lies."""

    def bind(self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline) -> NixlReading:
        """Attach to the offer's source if need be, plan if need be, and bind to this shadow."""
        if self._device is not CPU:
            raise Refused(
                f"{self._name} fills shadows in host memory, and this rank's is on {self._device.name}"
            )
        session, attachment = self._attachment(offer, deadline)
        binding = self._binding(session, attachment, target, shadow)
        for retired in self._retired:
            retired.close()
        self._retired.clear()
        return NixlReading(offer, session, attachment, binding, shadow)

    def forget(self, source: str) -> None:
        """Give the session up if that source belongs to it. A reading that has not ended keeps it, to the next bind at most."""
        if any(key[0] == source for key in self._attachments):
            self._close_session()

    def close(self) -> None:
        """Release everything. May be called twice."""
        self._close_session()
        for session in self._retired:
            session.close()
        self._retired.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_session(self) -> None:
        self._attachments.clear()
        session, self._session = self._session, None
        if session is None:
            return
        if session.readings:
            self._retired.append(session)
        else:
            session.close()

    def _attachment(self, offer: Offer, deadline: Deadline) -> tuple[NixlSession, NixlAttachment]:
        """The kept attachment if it still fits the offer, else a new one, in a session that works."""
        key = (offer.source, offer.layout, offer.kind)
        session, attachment = self._session, self._attachments.pop(key, None)
        if session is not None and attachment is not None and not session.closed:
            with suppress(ChannelClosed, DeadlineExceeded, MessageInvalid):
                if session.generation(attachment, deadline.within(PROBE_S)) == offer.generation:
                    self._attachments[key] = attachment
                    return session, attachment
            self._close_session()
        if self._session is None or self._session.closed:
            self._close_session()
            self._session = NixlSession(self._kernels)
        session, attachment = self._session, self._attach(self._session, offer, deadline)
        self._attachments[key] = attachment
        for dropped in evict_oldest(self._attachments, _ATTACHMENTS_KEPT):
            session.detach(dropped)
        return session, attachment

    def _attach(self, session: NixlSession, offer: Offer, deadline: Deadline) -> NixlAttachment:
        self.requests += 1
        attached = ask_source(offer, offer.layout, self._secret, self._codec, self._limits, deadline)
        sizes = attached.layout.memories_bytes
        if len(attached.memories) != len(sizes):
            raise MessageInvalid(f"{offer.source} answered with other memories than its layout has")
        entries = zip(attached.memories, sizes, strict=True)
        try:
            return session.attach(attached.layout, [location_from(entry, size) for entry, size in entries])
        except LiveWeightError:
            self._close_session()
            raise

    def _binding(
        self, session: NixlSession, attachment: NixlAttachment, target: Layout, shadow: Sequence[Memory]
    ) -> NixlBinding:
        """The kept one for this very shadow, else a new one: memory at the same address may be other memory by now."""
        for key, binding in list(attachment.bindings.items()):
            if any(owner() is None for owner in binding.owners):
                session.unbind(attachment.bindings.pop(key))
        key = (target.fingerprint, tuple([memory.address for memory in shadow]))
        kept = attachment.bindings.pop(key, None)
        if kept is not None and not kept.fits(shadow):
            session.unbind(kept)
            kept = None
        if kept is None:
            kept = session.bind(attachment, self._plan(attachment.layout, target), shadow)
        attachment.bindings[key] = kept
        for dropped in evict_oldest(attachment.bindings, _BINDINGS_KEPT):
            session.unbind(dropped)
        return kept

    def _plan(self, source: Layout, target: Layout) -> ReadPlan:
        key = (source.fingerprint, target.fingerprint)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = plan_reads(self._copies.get(source, target).rows, direct=self._direct)
        self._plans[key] = plan
        evict_oldest(self._plans, _PLANS_KEPT)
        return plan
