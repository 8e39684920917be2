"""`receiver.stream`: one plain iterator over a version, the same in every transfer mode and offer; whatever ends it, nothing is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import liveweight as lw
from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    DigestMismatch,
    Refused,
    VersionNotOffered,
    WrongState,
)
from liveweight.integrations.offer_stream import HeldOffer
from liveweight.observe.events import OfferKind
from liveweight.plan.digest_sums import lanes_from_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout, packed
from liveweight.trainer.offers.live import SharedModule
from liveweight.trainer.offers.single_source import SingleSourceOffers
from liveweight.transports.port import Reader, Reading
from liveweight.transports.registry import TRANSPORTS
from liveweight.wire.messages.values import Offer
from liveweight.worker.weight_stream import ReadableOffer, WeightStream
from tests.support.wire import SECRET, leaving_nothing

CELLS = [(name, kind) for name, mode in sorted(TRANSPORTS.items()) for kind in mode.offers]


class Net(torch.nn.Module):
    """A tied, a strided, an empty and a scalar tensor beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = torch.nn.Parameter(torch.randn(300, 64, generator=generator).to(torch.bfloat16))
        self.head = self.embed
        self.turned = torch.nn.Parameter(torch.randn(40, 30, generator=generator).t())
        self.none = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("scale", torch.tensor(2.5))


@contextmanager
def source(short_path: Path, mode: str, kind: OfferKind, **options: Any) -> Iterator[lw.Publisher]:
    net = Net()
    shared = lw.share_module(net) if kind == "live" else net
    with lw.Publisher(
        shared,
        address=f"ipc://{short_path}/source.sock",
        secret=SECRET,
        directory=short_path / "t",
        transfer_mode=mode,
        offer=kind,
        **{"timeout_s": 30.0, **options},
    ) as publisher:
        yield publisher
    if isinstance(shared, SharedModule):
        shared.close()


@contextmanager
def receiving(short_path: Path, name: str = "receiver") -> Iterator[lw.Receiver]:
    with lw.Receiver(
        {"own": torch.zeros(2)},
        address=f"ipc://{short_path}/{name}.sock",
        secret=SECRET,
        weights_from=f"ipc://{short_path}/source.sock",
    ) as receiver:
        yield receiver


@contextmanager
def offered(publisher: lw.Publisher, label: int, readers: int = 1) -> Iterator[Future[Any]]:
    """Offer in another thread, as a trainer would: a live or a ring offer returns when it was read."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(publisher.offer, label, readers=readers)
        yield future
        future.result(60)


def collected(receiver: lw.Receiver, version: int | None) -> dict[str, torch.Tensor]:
    """Everything, asked for until it is there: the trainer may not have offered yet."""
    deadline = Deadline.after(60.0)
    while True:
        try:
            return dict(receiver.stream(version))
        except VersionNotOffered:
            deadline.check("the offer")


@pytest.mark.parametrize(("mode", "kind"), CELLS)
def test_every_tensor_arrives_once_under_each_of_its_names(
    short_path: Path, mode: str, kind: OfferKind
) -> None:
    with leaving_nothing(), source(short_path, mode, kind) as publisher, receiving(short_path) as receiver:
        for label in (1, 2):
            with offered(publisher, label):
                found = collected(receiver, label)
        wanted = Net().state_dict()
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        assert found["embed"].data_ptr() == found["head"].data_ptr()
        assert receiver.version is None


def streams() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "liveweight-stream"]


PASSING = [(mode, kind) for mode, kind in CELLS if kind != "frozen"]


@pytest.mark.parametrize(("mode", "kind"), PASSING)
def test_an_offer_stands_until_as_many_have_read_it_as_it_was_made_for(
    short_path: Path, mode: str, kind: OfferKind
) -> None:
    wanted = Net().state_dict()
    with (
        leaving_nothing(),
        source(short_path, mode, kind) as publisher,
        receiving(short_path, "first") as first,
        receiving(short_path, "second") as second,
    ):
        for label in (1, 2):
            with offered(publisher, label, readers=2) as offer:
                for receiver in (first, second):
                    assert not offer.done()
                    found = collected(receiver, label)
                    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
            with pytest.raises(VersionNotOffered):
                dict(first.stream(label))


def test_a_reader_that_breaks_off_has_not_read_the_offer(short_path: Path) -> None:
    with (
        source(short_path, "ipc", "ring") as publisher,
        receiving(short_path, "first") as first,
        receiving(short_path, "second") as second,
        offered(publisher, 1, readers=2) as offer,
    ):
        address = f"ipc://{short_path}/source.sock"
        with WeightStream(HeldOffer(address, SECRET, 1), timeout_s=60.0, prefetch=1, chunk_bytes=1) as stream:
            assert next(stream)
        assert collected(first, 1)
        assert not offer.done()
        assert collected(second, 1)


def test_an_offer_that_too_few_have_read_ends_at_its_deadline_and_says_how_many(short_path: Path) -> None:
    with source(short_path, "ipc", "ring", timeout_s=3.0) as publisher, receiving(short_path) as receiver:
        with (
            pytest.raises(DeadlineExceeded, match=r"3 readers of .*source\.sock offers \(1 have read it\)"),
            offered(publisher, 1, readers=3),
        ):
            collected(receiver, 1)
        with offered(publisher, 2):
            assert collected(receiver, 2)


def test_a_number_of_readers_is_for_publishers_without_engines(short_path: Path) -> None:
    held = {"own": torch.zeros(2)}
    with source(short_path, "ipc", "ring") as publisher, pytest.raises(Refused, match="readers=0"):
        publisher.offer(1, readers=0)
    with (
        lw.Receiver(held, address=f"ipc://{short_path}/engine.sock", secret=SECRET) as engine,
        lw.Publisher(
            held, engines=[engine.address], secret=SECRET, directory=short_path / "t", offer="ring"
        ) as publisher,
        pytest.raises(Refused, match=r"readers=2.*without engines"),
    ):
        publisher.offer(1, readers=2)


@pytest.mark.parametrize("how", ["break", "error", "close", "garbage", "never begun"])
@pytest.mark.parametrize(("mode", "kind"), [("ipc", "frozen"), ("ipc", "ring"), ("ipc_snapshot", "frozen")])
def test_leaving_early_frees_everything(short_path: Path, mode: str, kind: OfferKind, how: str) -> None:
    with leaving_nothing(), source(short_path, mode, kind) as publisher, receiving(short_path) as receiver:
        with offered(publisher, 1) as offer:
            first(receiver)
            leave(receiver, how)
            gc.collect()
            assert streams() == []
            while not offer.done():  # a ring's, until somebody has read it
                with suppress(VersionNotOffered):
                    collect_now(receiver)
        with offered(publisher, 2):  # nobody holds the version before
            assert len(collected(receiver, 2)) == 5


def first(receiver: lw.Receiver) -> None:
    """Wait until something is on offer; a stream that is left at once."""
    deadline = Deadline.after(60.0)
    while True:
        with suppress(VersionNotOffered), receiver.stream() as stream:
            next(stream)
            return
        deadline.check("an offer")


def collect_now(receiver: lw.Receiver) -> dict[str, torch.Tensor]:
    return dict(receiver.stream())


def leave(receiver: lw.Receiver, how: str) -> None:
    """Leave a stream that way; of a ring, whose offer may be over by now, also one that finds nothing."""
    with suppress(VersionNotOffered):
        leave_now(receiver, how)


def leave_now(receiver: lw.Receiver, how: str) -> None:
    match how:
        case "break":
            for _ in receiver.stream():
                break
        case "error":
            with pytest.raises((ZeroDivisionError, VersionNotOffered)):
                divide(receiver)
        case "close":
            with receiver.stream() as stream:
                pass
            stream.close()
        case "garbage":
            stream = receiver.stream()
            del stream
        case _:
            receiver.stream()


def divide(receiver: lw.Receiver) -> None:
    for _ in receiver.stream():
        _ = 1 / 0


def test_errors_arrive_in_the_callers_thread(short_path: Path) -> None:
    with receiving(short_path) as receiver:
        with pytest.raises(ChannelClosed, match="source"):
            next(receiver.stream(timeout_s=20.0))
        with source(short_path, "ipc", "frozen") as publisher:
            publisher.offer("here")
            with pytest.raises(VersionNotOffered, match=r"asked for there, the source offers here"):
                next(receiver.stream("there"))
            with pytest.raises(Refused, match="ahead"):
                receiver.stream(prefetch=0)
        assert streams() == []
    with (
        lw.Receiver({"w": torch.zeros(1)}, address=f"ipc://{short_path}/b.sock", secret=SECRET) as without,
        pytest.raises(WrongState, match="weights_from"),
    ):
        without.stream()


class Counting:
    """A reader that counts its calls, and may damage what it reads. Implements OfferAccess, for a frozen offer of `ipc`."""

    def __init__(self, reader: Reader, offer: Offer, layout: Layout, digests: bytes) -> None:
        self.reader, self._offer, self._layout, self._digests = reader, offer, layout, digests
        self.binds, self.damages = 0, False

    def open(self, deadline: Deadline) -> ReadableOffer:
        del deadline
        lanes = lanes_from_bytes(self._digests, len(self._layout.tensors))
        return ReadableOffer(
            offer=self._offer,
            manifest=self._layout.manifest(),
            lanes=lanes,
            reader=self,
            kernels=choose_kernels(),
        )

    def interrupt(self) -> None: ...

    def release(self, *, read: bool) -> None: ...

    def bind(self, offer: Offer, target: Layout, shadow: Any, deadline: Deadline) -> Reading:
        self.binds += 1
        reading = self.reader.bind(offer, target, shadow, deadline)
        if self.damages:
            return Damaging(reading, shadow[0])  # type: ignore[return-value]
        return reading

    def forget(self, source: str) -> None: ...

    def close(self) -> None: ...


class Damaging:
    """A reading whose first byte is wrong afterwards."""

    def __init__(self, reading: Reading, memory: Memory) -> None:
        self._reading, self._memory, self.rows = reading, memory, reading.rows

    def read(self, first: int, last: int, go_on: Any) -> None:
        self._reading.read(first, last, go_on)
        self._memory.bytes()[0] ^= 1

    def check(self) -> None:
        self._reading.check()

    def end(self) -> None:
        self._reading.end()


@contextmanager
def counting(short_path: Path) -> Iterator[Counting]:
    with source(short_path, "ipc", "frozen") as publisher:
        publisher.offer(1)
        offers = publisher._offers
        assert isinstance(offers, SingleSourceOffers)
        assert offers.current is not None
        made = publisher._pull_server
        assert made is not None
        on_offer = made._state
        reader = TRANSPORTS["ipc"].reader(SECRET, choose_kernels())
        yield Counting(reader, offers.current, packed(offers.manifest.tensors), on_offer.digests)  # type: ignore[union-attr,arg-type]
        reader.close()


def test_no_more_is_read_ahead_than_was_asked_for(short_path: Path) -> None:
    with counting(short_path) as access:
        stream = WeightStream(access, timeout_s=30.0, prefetch=1, chunk_bytes=1)
        taken = 0
        for name, _ in stream:
            taken += name != "head"  # which comes with embed
            assert access.binds <= taken + 2  # one in the queue, one that waits for room
        assert taken == access.binds == 4


def test_what_differs_from_its_digest_is_named(short_path: Path) -> None:
    with counting(short_path) as access:
        access.damages = True
        with pytest.raises(DigestMismatch, match="embed"):
            next(WeightStream(access, timeout_s=30.0))
