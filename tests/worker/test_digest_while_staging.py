"""Digests that are taken while a shadow fills: the same as those of the filled shadow, in whatever order and with whatever goes astray."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import BoundDigest, choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed
from liveweight.plan.copies import plan_copies
from liveweight.plan.digest_order import copies_before
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import Lanes
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.row_table import Table
from liveweight.worker import shadow_digest
from liveweight.worker.digest_while_staging import DigestWhileStaging
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.staging import StagingStopped
from tests.support.layouts import Bytes, Full, filled
from tests.support.wire import soon
from tests.transports.test_transport_contract import blank, scenes

KERNELS = choose_kernels()
WITHIN_S = 120.0


@pytest.fixture(autouse=True)
def no_batch_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_digest, "SMALLEST_BATCH_BYTES", 1)
    monkeypatch.setattr(shadow_digest, "BATCH_LANES", 0)


@dataclass(frozen=True)
class Rows:
    """As much of a reading as its digest needs to know."""

    rows: Table


def memories(arrays: Sequence[Bytes]) -> list[Memory]:
    return [Memory.from_array(array) for array in arrays]


def begun(
    digest: ShadowDigest, rows: Table, shadow: Sequence[Memory], copy_threads: CopyThreads
) -> DigestWhileStaging:
    found = digest.begin(Rows(rows), shadow, copy_threads, ahead=True)  # type: ignore[arg-type]
    assert isinstance(found, DigestWhileStaging)
    return found


def rest_of(ahead: DigestWhileStaging) -> Lanes:
    lanes = ahead.finish(stop=lambda: False, deadline=soon())
    assert not isinstance(lanes, StagingStopped)
    return lanes


@given(scene=scenes(), data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
def test_whatever_lands_when_the_digest_is_that_of_the_whole_shadow(
    scene: tuple[dict[str, Full], Layout, Layout], data: st.DataObject
) -> None:
    tensors, source, target = scene
    rows = plan_copies(source, target).rows
    if len(rows) and data.draw(st.booleans(), label="one copy more, to where another has been"):
        astray = rows[data.draw(st.integers(0, len(rows) - 1))].copy()
        astray[1] = 0  # bytes of another place
        rows = np.concatenate([rows, astray[None, :]])
    shadow = memories(blank(target))
    copies = KERNELS.bind_copy(rows, memories(filled(source, tensors)), shadow)
    ends = sorted({*data.draw(st.lists(st.integers(0, len(rows)))), len(rows)})
    with CopyThreads(2) as copy_threads:
        digest = ShadowDigest(target, KERNELS)
        ahead = begun(digest, rows, shadow, copy_threads)
        batches = data.draw(st.permutations(list(zip([0, *ends[:-1]], ends, strict=True))))

        def copy() -> None:
            for first, last in batches:
                copies.run(first, last)
                ahead.landed(first, last)

        ahead.during(copy)
        assert np.array_equal(
            rest_of(ahead), digest.all_of(shadow, copy_threads=copy_threads, deadline=soon())
        )


SPEC = TensorSpec(name="w", dtype=DType.BFLOAT16, shape=(4096, 512))
"""Four megabytes: two readings of a digest, and four copies of a megabyte."""


def copies_of_a_megabyte() -> Table:
    whole = plan_copies(packed([SPEC]), packed([SPEC])).rows[0]
    rows = np.repeat(whole[None, :], 4, axis=0)
    rows[:, 10] = 1 << 20
    rows[:, 1] = rows[:, 3] = np.arange(4) << 20
    return rows


class Watched:
    """Kernels whose digests say when they are done."""

    def __init__(self) -> None:
        self.done = threading.Semaphore(0)

    def bind_digest(self, rows: Table, memories: Sequence[Memory], slots: int) -> Watched:
        watched = Watched()
        watched.done, watched.bound = self.done, KERNELS.bind_digest(rows, memories, slots)
        return watched

    bound: BoundDigest

    def run(self, first: int, last: int) -> Lanes:
        lanes = self.bound.run(first, last)
        self.done.release()
        return lanes


def test_what_has_landed_is_digested_before_the_rest_is_there() -> None:
    layout, content = packed([SPEC]), np.arange(SPEC.size_bytes, dtype=np.uint64).astype(np.uint8)
    shadow, kernels = [content.copy()], Watched()
    with CopyThreads(1) as copy_threads:
        digest = ShadowDigest(layout, kernels)  # type: ignore[arg-type]
        wanted = ShadowDigest(layout, KERNELS).all_of(
            memories(shadow), copy_threads=copy_threads, deadline=soon()
        )

        def digests(change: slice, *, seen: bool) -> None:
            ahead = begun(digest, copies_of_a_megabyte(), memories(shadow), copy_threads)

            def copy() -> None:
                ahead.landed(0, 3)
                assert kernels.done.acquire(
                    timeout=WITHIN_S
                )  # the first two megabytes; the fourth copy touches the others
                shadow[0][change] ^= 255
                ahead.landed(3, 4)

            ahead.during(copy)
            assert np.array_equal(rest_of(ahead), wanted) != seen
            shadow[0][change] ^= 255
            while kernels.done.acquire(blocking=False):
                pass

        digests(slice(0, 2 << 20), seen=False)
        digests(slice(2 << 20, 3 << 20), seen=True)


def test_the_thread_ends_with_the_work_that_it_stands_beside() -> None:
    with CopyThreads(1) as copy_threads:
        shadow = [np.zeros(SPEC.size_bytes, dtype=np.uint8)]
        ahead = begun(
            ShadowDigest(packed([SPEC]), KERNELS), copies_of_a_megabyte(), memories(shadow), copy_threads
        )

        def fail() -> None:
            raise ChannelClosed("the source is gone")

        with pytest.raises(ChannelClosed):
            ahead.during(fail)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("liveweight")] == []


def test_lanes_that_finish_at_once_digest_every_byte_once() -> None:
    layout = packed([TensorSpec(name=f"w{n}", dtype=DType.BFLOAT16, shape=(64, 512)) for n in range(64)])
    rows = plan_copies(layout, layout).rows
    shadow = [np.random.default_rng(5).integers(0, 256, layout.memories_bytes[0], dtype=np.uint8)]
    with CopyThreads(4) as copy_threads:
        digest = ShadowDigest(layout, KERNELS)
        ahead, together = begun(digest, rows, memories(shadow), copy_threads), threading.Barrier(4)

        def work(lane: int) -> None:
            together.wait(WITHIN_S)
            for first in range(lane, len(rows), 4):
                ahead.landed(first, first + 1)

        ahead.during(lambda: copy_threads.run(work))
        wanted = digest.all_of(memories(shadow), copy_threads=copy_threads, deadline=soon())
        assert np.array_equal(rest_of(ahead), wanted)


def test_a_reading_waits_for_the_last_copy_that_touches_it_and_for_no_other() -> None:
    rows = plan_digests(packed([SPEC])).rows
    assert copies_before(rows, copies_of_a_megabyte()).tolist() == [4]
    first = rows.copy()
    first[:, 4] = 1024  # its first megabyte
    assert copies_before(first, copies_of_a_megabyte()).tolist() == [1]
    assert copies_before(first, copies_of_a_megabyte()[1:]).tolist() == [0]
    assert copies_before(rows[:0], copies_of_a_megabyte()).tolist() == []
