"""What does not fit is refused before the first byte, with the names; the engine is untouched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import liveweight as lw
from liveweight.errors import (
    DeadlineExceeded,
    LayoutInvalid,
    ManifestInvalid,
    ManifestMismatch,
    MessageInvalid,
    Refused,
)
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import LiveOfferImpossible, PeerRefused, RoundOpened
from liveweight.rounds.replica import WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import Manifest
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret, load_or_create_secret
from liveweight.wire.listener import Listener
from liveweight.wire.messages import Attached, Describe, Message, Open, Refusal
from liveweight.wire.messages.values import Offer
from tests.support.stepping import engine, publisher, serving


@pytest.mark.parametrize(
    ("offered", "differences"),
    [
        ({"w": torch.zeros(4, 3)}, ["b missing"]),
        ({**engine(), "extra": torch.zeros(1)}, ["extra unexpected"]),
        ({**engine(), "b": torch.zeros(3, dtype=torch.int32)}, ["b expected float32[3], offered int32[3]"]),
        ({**engine(), "w": torch.zeros(3, 4)}, ["w expected float32[4, 3], offered float32[3, 4]"]),
        (
            {"w": torch.zeros(1), "c": torch.zeros(1)},
            ["w expected float32[4, 3], offered float32[1]", "b missing", "c unexpected"],
        ),
    ],
    ids=["missing", "unexpected", "dtype", "shape", "several"],
)
def test_a_manifest_that_does_not_fit_is_refused_when_the_publisher_is_made(
    short_path: Path, offered: dict[str, torch.Tensor], differences: list[str]
) -> None:
    live, bus = engine(), Bus()
    with (
        bus.subscribe(recorder := Recorder()),
        serving(live, short_path, bus) as address,
        pytest.raises(ManifestMismatch) as refused,
    ):
        publisher(offered, address, short_path)
    assert list(refused.value.differences) == differences
    assert not recorder.of(RoundOpened)
    assert all(not tensor.any() for tensor in live.values())


def test_an_empty_source_is_refused(short_path: Path) -> None:
    with serving(engine(), short_path) as address, pytest.raises(ManifestInvalid):
        publisher({}, address, short_path)


def test_names_that_become_the_same_without_their_wrappers_are_refused(short_path: Path) -> None:
    offered = {**engine(), "_orig_mod.w": torch.zeros(4, 3)}
    with serving(engine(), short_path) as address, pytest.raises(ManifestInvalid, match="w"):
        publisher(offered, address, short_path)


def test_regions_that_overlap_in_part_are_refused_when_the_rank_joins(short_path: Path) -> None:
    spec = lw.TensorSpec(name="w", dtype=lw.DType.FLOAT32, shape=(4, 3))
    held = {
        "upper": (torch.zeros(3, 3), [lw.Piece(tensor=spec, region=lw.box((0, 3), (0, 3)))]),
        "lower": (torch.zeros(2, 3), [lw.Piece(tensor=spec, region=lw.box((2, 4), (0, 3)))]),
    }
    with pytest.raises(LayoutInvalid, match=r"w: regions .* overlap in part"):
        lw.Receiver(held, address=f"ipc://{short_path}/engine.sock", secret=short_path / "secret")


def test_an_offer_that_the_mode_does_not_have_is_refused(short_path: Path) -> None:
    with serving(engine(), short_path) as address, pytest.raises(Refused, match="no ring offers"):
        publisher(engine(), address, short_path, transfer_mode="ipc_snapshot", offer="ring")


def test_a_live_offer_that_is_not_possible_says_why_and_freezes(short_path: Path) -> None:
    live, bus, recorder = engine(), Bus(), Recorder()
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with (
        bus.subscribe(recorder),
        serving(live, short_path) as address,
        publisher(source, address, short_path, offer="live", bus=bus) as sender,
    ):
        report = sender.publish(1)
        assert report.offer == "frozen"
        assert torch.equal(live["w"], source["w"])
    assert "not a torch module" in recorder.of(LiveOfferImpossible)[0].reason


def test_the_reason_for_freezing_instead_is_said_once_until_it_changes(short_path: Path) -> None:
    bus, recorder = Bus(), Recorder()
    net = torch.nn.Linear(3, 4)
    live = {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    private = net.weight.detach().clone()
    with (
        bus.subscribe(recorder),
        serving(live, short_path) as address,
        lw.share_module(net) as shared,
        publisher(shared, address, short_path, offer="live", bus=bus) as sender,
    ):
        arena = net.weight.data
        reasons = []
        for step, data in enumerate([arena, private, private, private, arena, private]):
            net.weight.data = data
            reasons.append((sender.publish(step).offer, len(recorder.of(LiveOfferImpossible))))
    assert reasons == [("live", 0), ("frozen", 1), ("frozen", 1), ("frozen", 1), ("live", 1), ("frozen", 2)]


@pytest.mark.parametrize("given", [None, 3, "a/path", [torch.zeros(1)]], ids=repr)
def test_a_receiver_of_what_holds_no_weights_says_what_is_accepted(given: Any, short_path: Path) -> None:
    with pytest.raises(
        Refused, match=r"a torch module, a mapping of names to tensors, or a Target, not builtins"
    ):
        lw.Receiver(given, address=f"ipc://{short_path}/engine.sock", secret=short_path / "secret")


def test_a_publisher_of_what_holds_no_weights_says_what_is_accepted(short_path: Path) -> None:
    with pytest.raises(Refused, match=r"a torch module.*or a Source, not from builtins\.int"):
        publisher(3, f"ipc://{short_path}/nobody.sock", short_path)


def test_an_fp32_trainer_is_cast_to_the_engines_dtype(short_path: Path) -> None:
    live = {"w": torch.zeros(64, 32, dtype=torch.bfloat16), "h": torch.zeros(8, dtype=torch.float16)}
    source = {"w": torch.randn(64, 32), "h": torch.randn(8)}
    with serving(live, short_path) as address, publisher(source, address, short_path) as sender:
        assert sender.publish(1).verified
        assert torch.equal(live["w"], source["w"].bfloat16())
        assert torch.equal(live["h"], source["h"].half())


def test_offer_lets_training_go_on_and_wait_has_the_outcome(short_path: Path) -> None:
    live = engine()
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with serving(live, short_path) as address, publisher(source, address, short_path) as sender:
        sender.offer(1)
        source["w"].fill_(7)  # frozen: the round must not see it
        report = sender.wait()
        assert str(report.version) == "1"
        assert torch.equal(live["w"], torch.ones(4, 3))
        assert set(report.metrics()) == {
            f"weight_sync/{name}"
            for name in (
                "total_s",
                "freeze_s",
                "stage_s",
                "verify_s",
                "vote_s",
                "stall_s",
                "bytes",
                "staleness",
                "version",
            )
        }
        assert report.metrics()["weight_sync/version"] == report.version.number == 1


def test_publishers_with_the_same_tensors_in_another_order_do_not_disturb_each_other(
    short_path: Path,
) -> None:
    live = engine()
    one = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    two = {"b": torch.full((3,), 2.0), "w": torch.full((4, 3), 2.0)}
    with (
        serving(live, short_path) as address,
        publisher(one, address, short_path) as first,
        publisher(two, address, short_path) as second,
    ):
        for step in range(3):
            assert first.publish(step).verified
            assert torch.equal(live["w"], one["w"])
            assert second.publish(step).verified
            assert torch.equal(live["w"], two["w"])


@pytest.mark.parametrize("quorum", [0, 2])
def test_a_quorum_that_cannot_be_is_refused(short_path: Path, quorum: int) -> None:
    with serving(engine(), short_path) as address, pytest.raises(Refused, match="quorum"):
        publisher(engine(), address, short_path, quorum=quorum)


def test_an_unchanged_round_says_that_nothing_was_verified_and_staleness_counts_the_rounds_missed(
    short_path: Path,
) -> None:
    live = engine()
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with serving(live, short_path) as address, publisher(source, address, short_path) as sender:
        assert sender.publish(1).staleness == 0
        again = sender.publish(1)
        assert (again.unchanged, again.verified) == (True, False)
        other = publisher(source, address, short_path)
        with other:
            other.publish("theirs")
        source["w"].fill_(5)
        assert sender.publish(2).metrics()["weight_sync/staleness"] == 0.0


def test_a_source_whose_layout_is_not_the_opened_one_fails_the_round(short_path: Path) -> None:
    live = engine()
    secret = load_or_create_secret(short_path / "secret")
    manifest = Manifest(
        tensors=tuple(
            lw.TensorSpec(name=name, dtype=lw.DType.FLOAT32, shape=tuple(tensor.shape))
            for name, tensor in live.items()
        )
    )
    opened_as, offered_as = packed(manifest.tensors), packed(manifest.tensors[:1])
    with (
        serving(live, short_path) as address,
        liar(f"ipc://{short_path}/liar", secret, offered_as) as source,
        closing(WireReplica(address, secret)) as replica,
    ):
        deadline = Deadline.after(30.0)
        replica.describe(Describe(structure="s", manifest=manifest), deadline)
        opened = replica.open(
            Open(
                publisher="p",
                version=lw.Version(run="r", label=1),
                structure="s",
                digests=None,
                offer=Offer(
                    mode="ipc", kind="frozen", source=source, layout=opened_as.fingerprint, generation=1
                ),
                verify=False,
                timeout_s=20.0,
            ),
            deadline,
        )
        assert opened.round is not None
        progress = replica.status(opened.round, "staged", deadline)
        assert progress.fault is not None
        assert (progress.fault.code, progress.fault.rank, progress.fault.step) == ("LW-203", 0, "stage")
        assert all(not tensor.any() for tensor in live.values())


@contextmanager
def liar(address: str, secret: Secret, layout: Layout) -> Iterator[str]:
    """A source that answers every rank with that layout, whatever it asked for."""
    stop = threading.Event()
    listener: Listener[Message] = Listener(address, secret, Codec(Message))

    def serve() -> None:
        with listener:
            while not stop.is_set():
                try:
                    incoming = listener.receive(Deadline.after(0.05), "a rank")
                except DeadlineExceeded:
                    continue
                answer = Attached(layout=layout, memories=(b"token",), descriptors="/nowhere")
                listener.send(incoming.peer, answer, incoming.call, Deadline.after(5.0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.address
    finally:
        stop.set()
        thread.join()


def test_a_program_that_hands_in_no_bus_finds_the_events_in_its_log(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with (
        caplog.at_level(logging.INFO, "liveweight"),
        serving(engine(), short_path) as address,
        publisher(source, address, short_path) as sender,
    ):
        sender.publish("step_1")
    assert any("committed step_1" in line for line in caplog.messages)
    assert any("kernels" in line for line in caplog.messages)


class OtherWait(msgspec.Struct, frozen=True, tag="WaitFor"):
    """WaitFor as nobody may send it: its round is no round."""

    round: float
    until: str = "staged"
    wait_s: float = 60.0


def test_a_call_that_cannot_be_decoded_is_answered_at_once_and_logged(short_path: Path) -> None:
    bus, seen = Bus(), Recorder()
    codec: Codec[OtherWait | Refusal] = Codec(OtherWait | Refusal)
    with bus.subscribe(seen), serving(engine(), short_path, bus) as address:
        secret = load_or_create_secret(short_path / "secret")
        with Channel(address, secret, codec, deadline=Deadline.after(20.0)) as channel:
            channel.send(OtherWait(1.5), Deadline.after(20.0))
            deadline = Deadline.after(60.0)
            answer = channel.request(OtherWait(1.5), deadline, "an answer")
            assert isinstance(answer, Refusal)
            assert deadline.waited_s() < 30.0, "long before the deadline"
            error = answer.fault.to_error()
            assert isinstance(error, MessageInvalid)
            assert "Expected `object`, got `float` - at `$[1].round`" in str(error)
    refusals = [(event.code, event.reason) for event in seen.of(PeerRefused)]
    assert refusals == [("LW-203", str(error))] * 2  # the leader has ended: the answer came before its event
