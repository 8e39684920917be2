"""A rank's session with sources: one NIXL agent, what it has registered, and the sources that it can reach.

Owns the agent, the landing buffer and every list and request. It lasts across rounds; after a failure it is closed, which ends
whatever is in flight, and a new one is made. The shadow is the rank's: what is registered of it ends before it does.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from liveweight.devices.cpu import allocate
from liveweight.devices.kernels import BoundCopy, Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import DeadlineExceeded
from liveweight.plan.reads import LANDING, PIECE_BYTES, ReadPlan
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import ALIGNMENT_BYTES, Layout
from liveweight.transports.ipc.arena import CLOSED, HEADER_BYTES, combined, generation_in
from liveweight.transports.nixl.arena_location import ArenaLocation
from liveweight.transports.nixl.library import List, NixlAgent, Request, Runs

SLOTS = 8
"""Pieces that may be in flight at once; each has a landing of its own."""
_POLL_S = 0.0005


@dataclass(slots=True, kw_only=True)
class NixlAttachment:
    """One layout of one source, as this session reaches it: its arenas, and a read of their headers."""

    layout: Layout
    peers: tuple[str, ...]
    locations: tuple[ArenaLocation, ...]
    header: Memory
    header_reads: tuple[Request, ...]
    lists: list[List]
    held: Any
    bindings: dict[object, NixlBinding] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class NixlBinding:
    """A read plan with its addresses: one request per piece. Good for the shadow that it was made for and no other."""

    plan: ReadPlan
    requests: tuple[Request, ...]
    lists: list[List]
    held: Any
    landed: BoundCopy | None
    owners: tuple[Callable[[], object], ...]

    def fits(self, shadow: Sequence[Memory]) -> bool:
        """Whether that is the shadow that was registered: the same objects, which still live."""
        return len(self.owners) == len(shadow) and all(
            owner() is memory.owner for owner, memory in zip(self.owners, shadow, strict=True)
        )


class NixlSession:
    """Used by one rank's staging thread and its copy threads; `lock` is held around what they share."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.agent = NixlAgent(f"liveweight-{secrets.token_hex(8)}", progress=False)
        self.lock = threading.Lock()
        self.closed = False
        self.readings = 0
        """How many readings have not ended."""
        self._landing: Memory | None = None
        self._attachments: list[NixlAttachment] = []

    def attach(self, layout: Layout, locations: Sequence[ArenaLocation]) -> NixlAttachment:
        """Reach a source's arenas."""
        peers = tuple(self.agent.add_peer(location.description) for location in locations)
        header = allocate(max(1, len(locations)) * HEADER_BYTES, "headers of arenas").memory
        held = self.agent.register(_runs([(header.address, header.size_bytes)]))
        lists: list[List] = []
        header_reads = []
        for number, (peer, location) in enumerate(zip(peers, locations, strict=True)):
            there = self.agent.prepare(_runs([(location.address, HEADER_BYTES)]), peer)
            here = self.agent.prepare(_runs([(header.address + number * HEADER_BYTES, HEADER_BYTES)]))
            lists += [here, there]
            header_reads.append(self.agent.request(here, there, 0, 1))
        attachment = NixlAttachment(
            layout=layout,
            peers=peers,
            locations=tuple(locations),
            header=header,
            header_reads=tuple(header_reads),
            lists=lists,
            held=held,
        )
        self._attachments.append(attachment)
        return attachment

    def generation(self, attachment: NixlAttachment, deadline: Deadline) -> int:
        """What the arenas' headers say now, read from the source. After earlier reads are done: theirs came before."""
        with self.lock:
            for request in attachment.header_reads:
                self._wait(request, deadline)
        raw = attachment.header.bytes().tobytes()
        headers = [raw[at : at + HEADER_BYTES] for at in range(0, len(raw), HEADER_BYTES)]
        # Zeros stand where the registration process had an arena that is withdrawn.
        return combined(
            generation_in(header, location.size_bytes) if any(header) else CLOSED
            for header, location in zip(headers, attachment.locations, strict=False)
        )

    def _wait(self, request: Request, deadline: Deadline) -> None:
        done = self.agent.post(request)
        while not done:
            if deadline.over:
                self.close()  # it may yet land
                raise DeadlineExceeded("the source to send its generation", deadline.waited_s())
            pause()
            done = self.agent.done(request)

    def landing(self) -> Memory:
        """Where pieces land that do not go straight to the shadow: one slot for each that may be in flight. Kept."""
        if self._landing is None:
            self._landing = allocate(SLOTS * PIECE_BYTES, "a landing").memory
            self.agent.register(_runs([(self._landing.address, self._landing.size_bytes)]))
        return self._landing

    def bind(self, attachment: NixlAttachment, plan: ReadPlan, shadow: Sequence[Memory]) -> NixlBinding:
        """Register the shadow where reads land in it, and make a request for every piece."""
        direct = np.unique(plan.reads[:, 2][plan.reads[:, 2] != LANDING])
        runs = _merged([(shadow[number].address, shadow[number].size_bytes) for number in direct.tolist()])
        held = self.agent.register(runs) if len(runs) else None
        lists, requests = [], []
        here, there = self._runs_of(attachment, plan, shadow)
        ends = plan.piece_reads.tolist()
        for first, last in zip([0, *ends[:-1]], ends, strict=bool(ends)):
            # One peer for all memories: a source has one registration process.
            ours = self.agent.prepare(here[first:last])
            theirs = self.agent.prepare(there[first:last], attachment.peers[0])
            lists += [ours, theirs]
            requests.append(self.agent.request(ours, theirs, 0, last - first))
        return NixlBinding(
            plan=plan,
            requests=tuple(requests),
            lists=lists,
            held=held,
            landed=self._landed(plan, shadow),
            owners=tuple(_watched(memory.owner) for memory in shadow),
        )

    def _landed(self, plan: ReadPlan, shadow: Sequence[Memory]) -> BoundCopy | None:
        """The copies out of the landings, bound to addresses alone: the shadow is held by who reads."""
        if not plan.lands:
            return None
        rows = plan.landed.copy()
        piece = np.searchsorted(plan.piece_landed, np.arange(len(rows)), side="right")
        rows[:, 1] += piece % SLOTS * PIECE_BYTES
        unheld = [dataclasses.replace(memory, owner=None) for memory in shadow]
        return self._kernels.bind_copy(rows, [self.landing()], unheld)

    def _runs_of(
        self, attachment: NixlAttachment, plan: ReadPlan, shadow: Sequence[Memory]
    ) -> tuple[Runs, Runs]:
        """The addresses of all reads, here and at the source."""
        reads = plan.reads
        here, there = (np.zeros((len(reads), 3), dtype=np.uint64) for _ in range(2))
        theirs = np.array([location.data for location in attachment.locations], dtype=np.int64)
        there[:, 0], there[:, 1] = theirs[reads[:, 0]] + reads[:, 1], reads[:, 4]
        ours = np.array([memory.address for memory in shadow] + [0], dtype=np.int64)
        if plan.lands:
            ours[-1] = self.landing().address
        piece = np.searchsorted(plan.piece_reads, np.arange(len(reads)), side="right")
        slots = np.where(reads[:, 2] == LANDING, piece % SLOTS * PIECE_BYTES, 0)
        here[:, 0], here[:, 1] = ours[reads[:, 2]] + reads[:, 3] + slots, reads[:, 4]
        return here, there

    def unbind(self, binding: NixlBinding) -> None:
        """Release a binding that has no reads in flight."""
        if not self.closed:
            self.agent.release(binding.requests, binding.lists)
            if binding.held is not None:
                self.agent.deregister(binding.held)

    def detach(self, attachment: NixlAttachment) -> None:
        """Release an attachment and its bindings."""
        for binding in attachment.bindings.values():
            self.unbind(binding)
        attachment.bindings.clear()
        if not self.closed:
            self.agent.release(attachment.header_reads, attachment.lists)
            self.agent.deregister(attachment.held)
            self._attachments.remove(attachment)

    def close(self) -> None:
        """End everything, also what is in flight: nothing lands after this. May be called twice."""
        if self.closed:
            return
        for attachment in list(self._attachments):
            self.detach(attachment)
        self.closed = True
        self.agent.close()


def pause() -> None:
    """Sleep between two polls of the requests in flight."""
    threading.Event().wait(_POLL_S)


def _watched(owner: object) -> Callable[[], object]:
    """A weak reference to an owner; an owner without weak references counts as gone."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return object


def _runs(locations: Sequence[tuple[int, int]]) -> Runs:
    runs = np.zeros((len(locations), 3), dtype=np.uint64)
    if locations:
        runs[:, :2] = locations
    return runs


def _merged(locations: list[tuple[int, int]]) -> Runs:
    """Runs that lie side by side as one: the parts of an allocation are registered together."""
    merged: list[tuple[int, int]] = []
    for address, size in sorted(location for location in locations if location[1]):
        last, length = merged[-1] if merged else (0, 0)
        if merged and address <= last + length + ALIGNMENT_BYTES:
            merged[-1] = (last, max(last + length, address + size) - last)
        else:
            merged.append((address, size))
    return _runs(merged)
