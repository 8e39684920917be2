"""Several transfer modes in one publisher: one that fails ends its round and says so, and the next attempt uses the next one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import liveweight as lw
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    DigestMismatch,
    LiveWeightError,
    MissingExtra,
    OfferChanged,
    OutOfMemory,
    OutOfSpace,
    Refused,
    RoundAborted,
    RoundFailed,
)
from liveweight.observe.bus import Bus
from liveweight.observe.events import LiveOfferImpossible, ModeFailed
from liveweight.trainer.offers.transfer_fallback import OpenMode, TransferFallback
from liveweight.transports.port import TransportSource
from liveweight.transports.registry import mode
from tests.support.stepping import engine, publisher, serving
from tests.support.wire import SECRET

pytest.importorskip("nixl")

MODES = ["gdr", "ipc_snapshot"]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 3), value), "b": torch.full((3,), value)}


def test_a_mode_that_ranks_cannot_read_fails_one_round_and_the_next_attempt_uses_the_next(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, source, bus, emitted = engine(), weights(1.0), Bus(), list[object]()
    with (
        bus.subscribe(emitted.append),
        serving(held, short_path) as address,
        publisher(source, address, short_path, modes=MODES, bus=bus) as sender,
    ):
        monkeypatch.setitem(sys.modules, "nixl", None)  # the rank is in this process
        with pytest.raises(RoundFailed, match="the next attempt uses ipc_snapshot") as failed:
            sender.publish(1)
        assert (failed.value.code, failed.value.step, failed.value.rank) == ("LW-501", "stage", 0)
        assert "pip install 'liveweight[nixl]'" in str(failed.value)
        assert (failed.value.retryable, failed.value.next_mode) == (True, "ipc_snapshot")
        assert not held["w"].any()
        for label in (1, 2):
            source["b"] += 1  # the label was not bound by the round that failed
            report = sender.publish(label)
            assert (report.mode, report.verified) == ("ipc_snapshot", True)
            assert [(one.mode, one.code) for one in report.failed_modes] == [("gdr", "LW-501")]
            assert torch.equal(held["b"], source["b"])
    (failure,) = [event for event in emitted if isinstance(event, ModeFailed)]
    assert (failure.mode, failure.code, failure.following) == ("gdr", "LW-501", "ipc_snapshot")


def test_after_the_last_mode_comes_the_first_again(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = engine()
    with (
        serving(held, short_path) as address,
        publisher(weights(1.0), address, short_path, modes=MODES) as sender,
    ):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "nixl", None)
            with pytest.raises(RoundFailed):
                sender.publish(1)
        for files in (short_path / "trainer").glob("snapshots-*"):
            shutil.rmtree(files)
        with pytest.raises(OutOfSpace):  # no offer could be made: the mode's failure, too
            sender.publish(1)
        report = sender.publish(1)
        assert (report.mode, [one.mode for one in report.failed_modes]) == ("gdr", ["ipc_snapshot"])
        assert torch.equal(held["w"], torch.ones(4, 3))


def test_a_live_offer_is_frozen_over_a_mode_that_has_none(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, module = {"weight": torch.zeros(4, 3)}, torch.nn.Linear(3, 4, bias=False)
    bus, emitted = Bus(), list[object]()
    with (
        bus.subscribe(emitted.append),
        serving(held, short_path) as address,
        lw.share_module(module) as shared,
        publisher(shared, address, short_path, modes=MODES, offer="live", bus=bus) as sender,
    ):
        monkeypatch.setitem(sys.modules, "nixl", None)
        with pytest.raises(RoundFailed):
            sender.publish(1)
        report = sender.publish(1)
        assert (report.mode, report.offer, report.failed_modes[0].mode) == ("ipc_snapshot", "frozen", "gdr")
        assert torch.equal(held["weight"], module.weight.detach())
    (why,) = [event for event in emitted if isinstance(event, LiveOfferImpossible)]
    assert why.reason == "ipc_snapshot has none"


def failed(step: str, cause: LiveWeightError) -> RoundFailed:
    return RoundFailed(cause, replica="engine", rank=1, step=step, waited_s=1.0, serving="step_1")


def two_fallback(transport_source: TransportSource) -> TransferFallback:
    return TransferFallback(
        [OpenMode(mode=mode(name), transport_source=transport_source) for name in MODES], Bus()
    )


@pytest.fixture
def transport_source(short_path: Path) -> TransportSource:
    """A transport source that no test uses."""
    return mode("ipc_snapshot").transport_source(short_path, SECRET)


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ("stage", ChannelClosed("the source is gone")),
        ("stage", DeadlineExceeded("rank 1 to be staged", 4.0)),
        ("stage", MissingExtra("gdr", "nixl")),
        ("verify", DigestMismatch(["w"], "rank 1")),
    ],
)
def test_what_fails_while_bytes_are_on_their_way_is_the_modes_failure(
    transport_source: TransportSource, step: str, cause: LiveWeightError
) -> None:
    fallback = two_fallback(transport_source)
    raised = fallback.after(failed(step, cause))
    assert (raised.next_mode, raised.retryable, raised.code) == ("ipc_snapshot", True, cause.code)
    assert fallback.now.mode.name == "ipc_snapshot"
    assert [one.mode for one in fallback.failed_modes] == ["gdr"]


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ("open", ChannelClosed("the engine is gone")),
        ("stage", OfferChanged("generation 3")),
        ("stage", OutOfMemory("a shadow of 5 bytes")),
        ("stage", RoundAborted("the publisher was closed")),
        ("verify", DeadlineExceeded("rank 1 to be verified", 4.0)),
        ("commit", ChannelClosed("the engine is gone")),
    ],
)
def test_what_fails_otherwise_leaves_the_mode_in_use(
    transport_source: TransportSource, step: str, cause: LiveWeightError
) -> None:
    fallback, error = two_fallback(transport_source), failed(step, cause)
    assert fallback.after(error) is error
    assert (fallback.now.mode.name, fallback.failed_modes) == ("gdr", ())


def test_one_mode_alone_is_kept_whatever_fails(transport_source: TransportSource) -> None:
    fallback = TransferFallback([OpenMode(mode=mode("gdr"), transport_source=transport_source)], Bus())
    error = failed("stage", ChannelClosed("the source is gone"))
    assert fallback.after(error) is error
    assert fallback.now.mode.name == "gdr"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"modes": ["gdr", "gdr"]}, "named twice"),
        ({"modes": ["gdr", "carrier pigeon"]}, "unknown transfer mode 'carrier pigeon'"),
        ({"modes": ["gdr"], "transfer_mode": "ipc"}, "give one of the two"),
        ({"modes": ["ipc_snapshot", "gdr"], "offer": "live"}, "ipc_snapshot has no live offers"),
        (
            {"modes": MODES, "address": "ipc:///nowhere.sock"},
            "a source that engines pull from has one transfer mode",
        ),
        ({"modes": MODES, "group": object()}, "a trainer of several ranks has one transfer mode"),
    ],
)
def test_modes_that_contradict_each_other_are_refused(
    short_path: Path, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(Refused, match=text):
        lw.Publisher(
            weights(1.0), engines=["ipc:///nowhere.sock"], secret=SECRET, directory=short_path, **arguments
        )
