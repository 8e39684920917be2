"""The live verifier: reads while the rank works, digests one state, and always answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid
from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent
from liveweight.plan.digest_sums import lanes_from_bytes
from liveweight.spec.digest import partial
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.wire.messages import DigestLive, LiveDigests
from liveweight.worker import live_verification as auditing
from liveweight.worker.live_verification import LiveVerifier
from liveweight.worker.shadow_lock import ShadowLock

WITHIN_S = 60.0
LAYOUT = packed([TensorSpec(name=name, dtype=DType.FLOAT32, shape=(2048, 128)) for name in ("a", "b", "c")])


class Weights:
    """A target of one live memory."""

    layout: Layout = LAYOUT

    def __init__(self) -> None:
        self.array = np.random.default_rng(1).integers(0, 255, LAYOUT.memories_bytes[0], dtype=np.uint8)
        self.moved = False

    def live(self, tensors: Collection[str] | None = None) -> Sequence[Memory]:
        """The memory, unless somebody has moved it."""
        del tensors
        if self.moved:
            raise LayoutInvalid("memory replaced by somebody else: a")
        return [Memory.from_array(self.array)]

    def read_back(self) -> None:
        """It is what serves."""


class VerifierScene:
    """A live verifier, and the queue of its answers."""

    def __init__(self, on_event: Callable[[AnyEvent], None] = lambda _: None, **settings: float) -> None:
        self.weights, self.shadow_lock, self._said = Weights(), ShadowLock(), threading.Semaphore(0)
        bus = Bus()
        bus.subscribe(on_event)
        self.live_verifier = LiveVerifier(
            rank=1,
            target=self.weights,  # type: ignore[arg-type]
            kernels=choose_kernels(),
            shadow_lock=self.shadow_lock,
            pace_bytes_per_s=settings.get("pace_bytes_per_s"),
            replica="r",
            bus=bus,
            wake=self._said.release,
        )

    def ask(self, names: tuple[str, ...] | None = None, timeout_s: float = WITHIN_S) -> LiveDigests:
        """One order, and its answer."""
        self.live_verifier.submit(DigestLive(audit=7, names=names, timeout_s=timeout_s))
        return self.answer()

    def answer(self) -> LiveDigests:
        assert self._said.acquire(timeout=WITHIN_S)
        (answer,) = self.live_verifier.answers()
        assert (answer.audit, answer.rank) == (7, 1)
        return answer


@contextmanager
def verifier_scene(
    on_event: Callable[[AnyEvent], None] = lambda _: None, **settings: float
) -> Iterator[VerifierScene]:
    made = VerifierScene(on_event, **settings)
    try:
        yield made
    finally:
        made.live_verifier.close()


@pytest.mark.parametrize("names", [None, ("b",), ("c", "a"), ("elsewhere",)])
def test_the_digests_are_those_of_the_memory_and_zero_for_what_was_not_asked(
    names: tuple[str, ...] | None,
) -> None:
    with verifier_scene() as one:
        answer = one.ask(names)
    assert answer.lanes is not None
    specs = LAYOUT.specs()
    expected = [
        partial(one.weights.array, p, specs[p.name]) if names is None or p.name in names else np.zeros(4)
        for p in LAYOUT.placements
    ]
    assert np.array_equal(lanes_from_bytes(answer.lanes, 3), np.stack(expected))


def test_nobody_pays_for_a_thread_before_the_first_question() -> None:
    before = threading.active_count()
    with verifier_scene() as one:
        assert threading.active_count() == before
        one.ask()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_reading_with_a_swap_in_it_is_worth_nothing_and_the_next_one_counts() -> None:
    def swap(_: AnyEvent) -> None:
        if one.shadow_lock.swaps == 0:
            one.shadow_lock.swaps += 1

    with verifier_scene(swap) as one:
        spoilt = one.ask()
        assert (spoilt.lanes, spoilt.fault) == (None, None)
        assert one.ask().lanes is not None


def test_tensors_that_are_elsewhere_are_a_fault_unless_a_swap_moved_them() -> None:
    def move(_: AnyEvent) -> None:
        one.weights.moved = True
        one.shadow_lock.swaps += swaps

    swaps = 1
    with verifier_scene(move) as one:
        answer = one.ask()
        assert (answer.lanes, answer.fault) == (None, None)
        swaps = 0
        answer = one.ask()
    assert answer.lanes is None
    assert answer.fault is not None
    assert (answer.fault.code, answer.fault.rank, answer.fault.step) == ("LW-103", 1, "verify")


def test_a_swap_under_way_is_waited_for_and_a_lasting_doubt_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with verifier_scene() as one:
        one.shadow_lock.doubt = True
        one.live_verifier.submit(DigestLive(audit=7, names=None, timeout_s=WITHIN_S))
        one.shadow_lock.doubt = False
        assert one.answer().lanes is not None
        monkeypatch.setattr(auditing, "DOUBT_S", 0.05)
        one.shadow_lock.doubt = True
        answer = one.ask()
        assert answer.fault is not None
        assert answer.fault.code == "LW-107"
        assert "in doubt about the last commit" in answer.fault.message


def test_a_reading_that_takes_too_long_says_so_and_closing_ends_one() -> None:
    with verifier_scene(pace_bytes_per_s=1.0) as one:
        answer = one.ask(timeout_s=0.2)
        assert answer.fault is not None
        assert answer.fault.code == "LW-301"
        one.live_verifier.submit(DigestLive(audit=7, names=None, timeout_s=WITHIN_S))
    assert not [t for t in threading.enumerate() if t.name.startswith("liveweight-live-verifier")]
