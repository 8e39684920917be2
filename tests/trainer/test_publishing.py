"""What a publisher does between offers and outcomes: live offers that cannot stand, labels after failures, interrupts, and its end."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import liveweight as lw
from liveweight.errors import LabelInvalid, RoundFailed, VersionConflict, VersionNotOffered, WrongState
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import AnyEvent, LiveOfferImpossible, RoundEnded, RoundOpened, StagingBegan
from tests.support.stepping import engine, publisher, serving


class Net(nn.Module):
    """What the engine holds, as a trainer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 3), requires_grad=False)
        self.b = nn.Parameter(torch.ones(3), requires_grad=False)


def new_weight(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((4, 3), value), requires_grad=False)


# Labels that cannot be.


def test_a_label_that_no_engine_could_read_is_refused_before_anything_begins(short_path: Path) -> None:
    live, net, engine_bus, rounds = engine(), Net(), Bus(), Recorder()
    with (
        engine_bus.subscribe(rounds),
        serving(live, short_path, engine_bus) as address,
        publisher(net, address, short_path) as sender,
    ):
        for label in (None, 1.5, True, "", "two\nlines", 2**63):
            with pytest.raises(LabelInvalid, match="a label"):
                sender.publish(label)  # type: ignore[arg-type]
        assert not rounds.of(RoundOpened)
        assert str(sender.publish(torch.tensor(3)).version) == "3"  # type: ignore[arg-type]
        assert torch.equal(live["w"], net.w)


def test_a_number_and_its_text_are_one_label(short_path: Path) -> None:
    live, net = engine(), Net()
    with serving(live, short_path) as address, publisher(net, address, short_path, run="r") as sender:
        first = sender.publish(10)
        again = sender.publish("10")
        assert (again.unchanged, again.version) == (True, first.version)
        assert not sender.fleet().behind
        net.w = new_weight(2.0)
        with pytest.raises(VersionConflict):
            sender.publish("10")
        with (
            publisher(net, address, short_path, run="r") as successor,
            pytest.raises(RoundFailed, match="LW-104"),
        ):
            successor.publish("10")
        assert torch.equal(live["w"], torch.ones(4, 3))


# Numbers.


def test_versions_are_numbered_in_the_order_of_their_offers_whatever_their_labels(short_path: Path) -> None:
    live, net = engine(), Net()
    with serving(live, short_path) as address, publisher(net, address, short_path) as sender:
        numbers: list[int | None] = []
        for label in ("step_9", 3, "last"):
            net.w = new_weight(float(len(numbers)))
            numbers.append(sender.publish(label).version.number)
        assert numbers == [1, 2, 3]
        again = sender.publish("last")
        assert (again.unchanged, again.version.number) == (True, 3)
        served = sender.fleet().replicas[0].serving
        assert served is not None and served.number == 3
        assert [one.number for one in sender.undo() if one is not None] == [2]
        net.w = new_weight(1.0)
        back = sender.publish(3)
        assert (back.unchanged, back.version.number) == (True, 2)  # installed already, under that number
        net.w = new_weight(0.0)
        anew = sender.publish("step_9")
        assert (anew.unchanged, anew.version.number, anew.replicas[0].serving) == (False, 4, anew.version)


def test_a_successor_in_the_same_run_goes_on_after_the_highest_number_that_engines_serve(
    short_path: Path,
) -> None:
    live, net = engine(), Net()
    with serving(live, short_path) as address:
        with publisher(net, address, short_path, run="r") as sender:
            sender.publish("a")
            net.w = new_weight(2.0)
            assert sender.publish("b").version.number == 2
        with publisher(net, address, short_path, run="r") as successor:
            again = successor.publish("b")
            assert (again.unchanged, again.version.number) == (True, 2)
            net.w = new_weight(3.0)
            assert successor.publish("c").version.number == 3
        with publisher(net, address, short_path, run="another") as other:
            assert other.publish("c").version.number == 1


# Live offers of memory that the parameters no longer use.


@pytest.mark.parametrize("verify", [True, False])
def test_parameters_that_were_replaced_are_frozen_and_what_lay_in_the_arena_is_never_served(
    short_path: Path, verify: bool
) -> None:
    live, net, trainer_bus, engine_bus = engine(), Net(), Bus(), Bus()
    emitted, rounds = Recorder(), Recorder()
    with (
        trainer_bus.subscribe(emitted),
        engine_bus.subscribe(rounds),
        serving(live, short_path, engine_bus) as address,
        lw.share_module(net) as shared,
        publisher(shared, address, short_path, offer="live", verify=verify, bus=trainer_bus) as sender,
    ):
        assert sender.publish(1).offer == "live"
        in_arena, net.w = net.w, new_weight(5.0)
        report = sender.publish(2)
        assert (report.offer, report.verified, report.staleness) == ("frozen", verify, 0)
        assert torch.equal(live["w"], torch.full((4, 3), 5.0))
        assert "w is no longer where share_module put it" in emitted.of(LiveOfferImpossible)[0].reason

        net.w.fill_(6.0)
        assert sender.publish(3).offer == "frozen"
        assert (
            len(rounds.of(RoundOpened)) == 4
        )  # after one invalidated offer, parameters are checked before a round is opened
        assert torch.equal(live["w"], torch.full((4, 3), 6.0))

        net.w = in_arena
        net.w.fill_(7.0)
        assert sender.publish(4).offer == "live"
        assert torch.equal(live["w"], torch.full((4, 3), 7.0))
    outcomes = [ended.outcome.value for ended in rounds.of(RoundEnded)]
    assert outcomes == ["committed", "aborted", "committed", "committed", "committed"]


def test_what_lies_in_the_arena_is_not_taken_for_what_is_installed_already(short_path: Path) -> None:
    live, net = engine(), Net()
    with (
        serving(live, short_path) as address,
        lw.share_module(net) as shared,
        publisher(shared, address, short_path, offer="live") as sender,
    ):
        sender.publish(1)
        net.w = new_weight(5.0)
        with pytest.raises(VersionConflict):
            sender.publish(1)
        assert torch.equal(live["w"], torch.ones(4, 3))
        assert sender.publish(2).offer == "frozen"


def test_a_module_that_was_moved_back_to_private_memory_is_frozen(short_path: Path) -> None:
    live, net = engine(), Net()
    with (
        serving(live, short_path) as address,
        lw.share_module(net) as shared,
        publisher(shared, address, short_path, offer="live") as sender,
    ):
        sender.publish(1)
        shared.close()
        net.w.fill_(5.0)
        assert sender.publish(2).offer == "frozen"
        assert torch.equal(live["w"], net.w)


# Exact moments of a round.


class PauseAt:
    """A reader of events that blocks the emitter of one event of that kind, once, until `go` is set."""

    def __init__(self, kind: type[AnyEvent]) -> None:
        self._kind = kind
        self._armed = True
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, event: AnyEvent) -> None:
        if self._armed and isinstance(event, self._kind):
            self._armed = False
            self.reached.set()
            self.go.wait(60.0)


@contextmanager
def when(moment: threading.Event, act: Callable[[], None]) -> Iterator[None]:
    """Do that, in a thread of its own, once the moment has come."""

    def wait() -> None:
        if moment.wait(60.0):
            act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize("verify", [True, False])
def test_an_interrupted_live_offer_is_ended_and_what_is_read_after_it_is_nothing(
    short_path: Path, verify: bool
) -> None:
    live, net, bus, lease = engine(), Net(), Bus(), PauseAt(StagingBegan)
    main = threading.main_thread().ident
    assert main is not None
    with (
        bus.subscribe(lease),
        serving(live, short_path, bus) as address,
        lw.share_module(net) as shared,
        publisher(shared, address, short_path, offer="live", verify=verify) as sender,
    ):
        with (
            when(lease.reached, lambda: signal.pthread_kill(main, signal.SIGINT)),
            pytest.raises(KeyboardInterrupt),
        ):
            sender.publish(1)
        net.w.fill_(9.0)  # the parameters may change now; the rank has read nothing yet
        lease.go.set()
        with pytest.raises(RoundFailed) as failed:
            sender.publish(2)
        assert failed.value.code == "LW-403"
        assert not live["w"].any()
        assert sender.publish(2).offer == "live"
        assert torch.equal(live["w"], net.w)


def test_the_label_of_a_failed_round_may_be_used_again_for_other_content(short_path: Path) -> None:
    live, source, bus, lease = (
        engine(),
        {"w": torch.ones(4, 3), "b": torch.ones(3)},
        Bus(),
        PauseAt(StagingBegan),
    )
    with (
        bus.subscribe(lease),
        serving(live, short_path, bus) as address,
        publisher(source, address, short_path, timeout_s=1.0) as sender,
    ):
        with pytest.raises(RoundFailed) as failed:
            sender.publish(1)
        assert failed.value.retryable
        lease.go.set()
        source["w"].fill_(2.0)
        assert not sender.publish(1).unchanged
        assert torch.equal(live["w"], source["w"])
        assert sender.publish(1).unchanged
        source["w"].fill_(3.0)
        with pytest.raises(VersionConflict):
            sender.publish(1)


def test_a_source_binds_a_label_when_its_version_was_read_and_not_before(short_path: Path) -> None:
    source, secret = {"w": torch.ones(4, 3)}, short_path / "secret"
    with (
        lw.Publisher(
            source, address=f"ipc://{short_path}/source.sock", secret=secret, directory=short_path / "trainer"
        ) as sender,
        lw.Receiver(
            {"x": torch.zeros(1)},
            address=f"ipc://{short_path}/engine.sock",
            secret=secret,
            weights_from=f"ipc://{short_path}/source.sock",
        ) as receiver,
    ):
        sender.offer("a")
        source["w"].fill_(2.0)
        again = sender.offer("a")  # nobody has read what it was before
        assert sender.offer("a") == again
        assert [tensor.tolist() for _, tensor in receiver.stream("a")] == [source["w"].tolist()]
        assert sender.offer("a") == again, "the same content"
        source["w"].fill_(3.0)
        with pytest.raises(VersionConflict):
            sender.offer("a")
        with pytest.raises(VersionNotOffered):
            next(receiver.stream())
        sender.offer("b")
        assert [tensor.tolist() for _, tensor in receiver.stream()] == [source["w"].tolist()]
        with pytest.raises(VersionConflict):
            sender.offer("a")


# Threads.


def test_a_second_thread_is_refused_while_a_round_runs_and_may_close(short_path: Path) -> None:
    live, bus, lease = engine(), Bus(), PauseAt(StagingBegan)
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    failures: list[BaseException] = []

    def publish() -> None:
        try:
            sender.publish(1)
        except RoundFailed as error:
            failures.append(error)

    with bus.subscribe(lease), serving(live, short_path, bus) as address:
        sender = publisher(source, address, short_path)
        training = threading.Thread(target=publish, name="training")
        training.start()
        assert lease.reached.wait(60.0)
        calls: dict[str, Callable[[], object]] = {
            "publish": lambda: sender.publish(2),
            "offer": lambda: sender.offer(2),
            "wait": sender.wait,
            "undo": sender.undo,
            "verify": sender.verify,
            "fleet": sender.fleet,
            "catch_up": sender.catch_up,
        }
        for name, call in calls.items():
            with pytest.raises(WrongState) as refused:
                call()
            said = f"{name} is not possible while publish runs in thread training; one thread at a time"
            assert str(refused.value).startswith(said)
        sender.close()
        training.join()
        lease.go.set()
    assert [failure.code for failure in failures if isinstance(failure, RoundFailed)] == ["LW-603"]


def test_threads_may_take_turns_with_a_publisher(short_path: Path) -> None:
    live, source = engine(), {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with serving(live, short_path) as address, publisher(source, address, short_path) as sender:
        for label in (1, 2):
            source["w"].fill_(label)
            training = threading.Thread(target=sender.publish, args=(label,))
            training.start()
            training.join()
        assert sender.fleet().replicas[0].serving == sender.publish(2).version
        assert torch.equal(live["w"], source["w"])


def test_a_second_thread_is_refused_at_a_receivers_boundary(short_path: Path) -> None:
    within, go, done = threading.Event(), threading.Event(), threading.Event()

    def hook() -> None:
        within.set()
        go.wait(60.0)

    def step() -> None:
        while not done.is_set():
            receiver.at_boundary(idle_s=0.01)

    with (
        lw.Receiver(
            engine(), address=f"ipc://{short_path}/engine.sock", secret=short_path / "secret", hooks=[hook]
        ) as receiver,
        publisher(engine(), receiver.address, short_path) as sender,
    ):
        stepping = threading.Thread(target=step, name="stepping")
        stepping.start()
        sender.offer(1)
        assert within.wait(60.0)
        with pytest.raises(WrongState, match="while at_boundary runs in thread stepping"):
            receiver.at_boundary()
        go.set()
        sender.wait()
        done.set()
        stepping.join()


# The end.


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closing_does_not_wait_for_an_engine_that_never_answers(short_path: Path) -> None:
    threads, held = set(threading.enumerate()), descriptors()
    source = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    with socket.socket(socket.AF_UNIX) as mute:
        with serving(engine(), short_path) as address:
            sender = publisher(source, address, short_path, timeout_s=300.0)
            sender.publish(1)
        mute.bind(address.removeprefix("ipc://"))
        mute.listen()
        sender.offer(2)
        with mute.accept()[0]:  # the publisher has come to its successor
            began_s = time.monotonic()
            sender.close()
            assert time.monotonic() - began_s < 8.0
    sender.close()
    assert set(threading.enumerate()) <= threads
    assert descriptors() <= held
