"""The pull server and engines that pull from it: when a read lease is granted, and when it ends. Real sockets, both halves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    MessageInvalid,
    MessageTooLarge,
    VersionNotOffered,
    WrongSecret,
)
from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent, ReadersRevoked
from liveweight.rounds.read_lease import ReadLease
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec, Version
from liveweight.trainer.offers.pull_server import OfferedVersion, PullServer
from liveweight.wire import messages as m
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import Offer
from liveweight.wire.waker import Waker

SECRET = Secret(bytes(range(32)))
MANIFEST = Manifest(tensors=(TensorSpec(name="w", dtype=DType.FLOAT32, shape=(2,)),))
BUS = Bus()
WITHIN_S = 30.0


def on_offer(label: str | int, generation: int = 1, manifest: Manifest | None = None) -> OfferedVersion:
    offer = Offer(mode="ipc", kind="frozen", source="ipc:///s", layout="l", generation=generation)
    version = Version(run="r", label=label, digest="d")
    return OfferedVersion(
        version=version, structure="structure", manifest=manifest or MANIFEST, digests=bytes(16), offer=offer
    )


def pull_server_at(place: Path) -> PullServer:
    return PullServer(f"ipc://{place}/s.sock", SECRET, bus=BUS)


@pytest.fixture
def pull_server(short_path: Path) -> Iterator[PullServer]:
    made = pull_server_at(short_path)
    yield made
    made.close()


@contextmanager
def leased(pull_server: PullServer, version: str | None = None, **changes: Any) -> Iterator[ReadLease]:
    """A read lease that its requester does not release: it ends with the connection."""
    given: dict[str, Any] = {"requester": "a", "lease_s": WITHIN_S, "deadline": Deadline.after(WITHIN_S)}
    lease = ReadLease(pull_server.address, SECRET, version=version, cancel=Waker(), **given | changes)
    try:
        yield lease
    finally:
        lease._channel.close()


class Waiting(threading.Thread):
    """A thread that waits for the readers, and the readers that were revoked."""

    def __init__(self, pull_server: PullServer, within_s: float = WITHIN_S) -> None:
        super().__init__()
        self.revoked: list[str] = []
        self._pull_server, self._within_s = pull_server, within_s
        self.start()

    def run(self) -> None:
        with BUS.subscribe(self._on_event):
            self._pull_server.wait_for_readers(Deadline.after(self._within_s))

    def _on_event(self, event: AnyEvent) -> None:
        if isinstance(event, ReadersRevoked):
            self.revoked += event.readers

    def result(self) -> list[str]:
        self.join(WITHIN_S)
        assert not self.is_alive()
        return self.revoked


@pytest.mark.parametrize(("label", "asked"), [("step_1", None), ("step_1", "step_1"), (7, "7"), (7, None)])
def test_a_version_is_held_by_its_label_or_as_the_newest(
    pull_server: PullServer, label: str | int, asked: str | None
) -> None:
    pull_server.put(on_offer(label))
    with leased(pull_server, asked) as lease:
        grant = lease.grant
    assert (grant.version.label, grant.structure, grant.manifest) == (label, "structure", MANIFEST)
    assert (grant.digests, grant.offer) == (bytes(16), on_offer(label).offer)


def test_what_is_not_offered_is_refused_with_what_is(pull_server: PullServer) -> None:
    with pytest.raises(VersionNotOffered, match="offers nothing") as refused, leased(pull_server):
        pass
    assert refused.value.offered == ()
    pull_server.put(on_offer("step_2"))
    with pytest.raises(VersionNotOffered, match="asked for step_1") as refused, leased(pull_server, "step_1"):
        pass
    assert refused.value.offered == ("step_2",)


def test_who_asks_while_the_offer_changes_waits_for_the_next(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    labels: list[str | int] = []

    def ask() -> None:
        with leased(pull_server) as lease:
            labels.append(lease.grant.version.label)

    asking = threading.Thread(target=ask)
    with pull_server.changing():
        asking.start()
        with (
            pytest.raises(DeadlineExceeded, match="to make its next offer"),
            leased(pull_server, deadline=Deadline.after(0.2)),
        ):
            pass
        assert labels == []
        pull_server.put(on_offer("step_2"))
    asking.join(WITHIN_S)
    assert labels == ["step_2"]


def test_a_change_that_fails_leaves_nothing_on_offer(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    with pytest.raises(ZeroDivisionError), pull_server.changing():
        raise ZeroDivisionError
    with pytest.raises(VersionNotOffered, match="offers nothing"), leased(pull_server):
        pass


def test_a_reader_is_waited_for_until_it_releases_its_read_lease(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    with leased(pull_server) as first, leased(pull_server) as second:
        with pull_server.changing():
            waiting = Waiting(pull_server)
            first.release()
            first.release()
            assert waiting.is_alive()
            second.release()
            assert waiting.result() == []
        first.check()
        second.check()


def test_a_reader_that_is_gone_holds_nothing(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    with leased(pull_server):
        waiting = Waiting(pull_server)
        assert waiting.is_alive()
    assert waiting.result() == []


def test_a_lease_that_is_over_holds_nothing(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    with leased(pull_server, lease_s=0.3):
        assert Waiting(pull_server).result() == []


def test_who_still_reads_at_the_deadline_is_named_and_forgotten(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    with leased(pull_server, requester="engine, asked by operator/1") as lease:
        assert Waiting(pull_server, within_s=0.3).result() == ["engine, asked by operator/1"]
        assert Waiting(pull_server).result() == []
        lease.release()  # too late; the reply says so, and that is no error


def channel_to(pull_server: PullServer) -> Channel[m.Message]:
    return Channel(pull_server.address, SECRET, Codec(m.Message), deadline=Deadline.after(WITHIN_S))


def test_only_the_one_who_holds_can_release_and_hears_whether_it_was_in_time(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    soon = Deadline.after(WITHIN_S)
    with channel_to(pull_server) as one, channel_to(pull_server) as other:
        ask = m.AcquireReadLease(requester="a", version=None, lease_s=WITHIN_S, wait_s=0.0)
        lease = one.request(ask, soon, "a hold")
        assert isinstance(lease, m.ReadLeaseGranted)
        release = m.ReleaseReadLease(lease=lease.lease, read=True)
        assert other.request(release, soon, "a release") == m.ReadLeaseReleased(revoked=True)
        waiting = Waiting(pull_server)
        wanted = one.receive(soon, "the source to want its memory")
        assert isinstance(wanted, m.MemoryWanted)
        assert wanted.lease == lease.lease
        assert one.request(release, soon, "a release") == m.ReadLeaseReleased(revoked=False)
        assert waiting.result() == []
        assert one.request(release, soon, "a release") == m.ReadLeaseReleased(revoked=True)


def test_a_source_that_is_asked_for_something_else_says_so_and_goes_on(pull_server: PullServer) -> None:
    pull_server.put(on_offer("step_1"))
    with channel_to(pull_server) as channel:
        refused = channel.request(m.GetReplicaState(wait_s=1.0), Deadline.after(WITHIN_S), "an answer")
    assert isinstance(refused, m.Refusal)
    assert refused.fault.code == MessageInvalid.code
    with leased(pull_server) as lease:
        lease.check()


def test_a_source_that_closes_is_noticed_by_who_reads(pull_server: PullServer, short_path: Path) -> None:
    pull_server.put(on_offer("step_1"))
    with leased(pull_server) as lease:
        pull_server.close()
        pull_server.close()
        with pytest.raises(ChannelClosed, match="gone while ranks read step_1"):
            while True:
                lease.check()
        lease.release()
    assert list(short_path.iterdir()) == []


def test_only_holders_of_the_secret_may_ask(pull_server: PullServer) -> None:
    other = Secret(bytes(32))
    with pytest.raises(WrongSecret):
        ReadLease(
            pull_server.address,
            other,
            requester="a",
            version=None,
            lease_s=1.0,
            deadline=Deadline.after(WITHIN_S),
            cancel=Waker(),
        )


def test_where_no_source_is_that_is_said_and_a_wait_for_one_can_be_ended(short_path: Path) -> None:
    cancel, address = Waker(), f"ipc://{short_path}/nobody.sock"
    cancel.wake()
    with pytest.raises(ChannelClosed, match=r"nobody\.sock"):
        ReadLease(
            address,
            SECRET,
            requester="a",
            version=None,
            lease_s=1.0,
            deadline=Deadline.after(WITHIN_S),
            cancel=cancel,
        )


def test_a_manifest_that_could_not_be_told_is_refused_when_it_is_offered(short_path: Path) -> None:
    long = Manifest(tensors=(TensorSpec(name="w" * (65 << 20), dtype=DType.FLOAT32, shape=(2,)),))
    pull_server = pull_server_at(short_path)
    try:
        with pytest.raises(MessageTooLarge), pull_server.changing():
            pull_server.put(on_offer("step_1", manifest=long))
    finally:
        pull_server.close()
