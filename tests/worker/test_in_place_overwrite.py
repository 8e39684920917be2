"""The overwrite queue between the threads of a rank in place, and where its chunks end."""

from __future__ import annotations

import numpy as np
import pytest

from liveweight.plan.copies import COLUMNS, row_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import whole
from liveweight.wire.messages.values import Overwritten
from liveweight.worker.in_place_overwrite import InPlaceSettings, OverwriteQueue, OverwriteRequest

SHAPE = (1024,)


def rows_of(memories: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """One row of a KB for each, into that memory."""
    rows = np.zeros((len(memories), len(COLUMNS)), dtype=np.int64)
    rows[:, 2] = memories
    rows[:, 4] = rows[:, 7] = 1
    rows[:, 10] = 1024
    return rows


def layout() -> Layout:
    specs = tuple(TensorSpec(name=name, dtype=DType.UINT8, shape=SHAPE) for name in ("main", "draft"))
    places = tuple(
        Placement(name=spec.name, region=whole(SHAPE), memory=n, offset_bytes=0, strides_bytes=(1,))
        for n, spec in enumerate(specs)
    )
    return Layout(tensors=specs, memories_bytes=(1024, 1024), placements=places)


def test_chunks_of_the_draft_have_a_size_of_their_own() -> None:
    rows = rows_of([0] * 8 + [1] * 8)
    assert row_bytes(rows).tolist() == [1024] * 16
    chosen = InPlaceSettings(chunk_bytes=4096, draft_chunk_bytes=2048, draft=frozenset({"draft"}))
    assert np.diff([0, *chosen.ends(rows, layout())]).tolist() == [4, 4, 2, 2, 2, 2]
    assert np.diff([0, *InPlaceSettings(chunk_bytes=1).ends(rows, layout())]).tolist() == [1] * 16
    assert InPlaceSettings().ends(rows[:0], layout()).tolist() == []
    with pytest.raises(ValueError, match="chunks of 0"):
        InPlaceSettings(chunk_bytes=0)


def test_an_request_that_nobody_took_up_in_time_was_not_begun_and_is_not_begun_later() -> None:
    request = OverwriteRequest(1, Deadline.after(0.0))
    done, fault = request.wait(rank=3)
    assert fault is not None
    assert (done.begun, fault.code, fault.rank) == (False, "LW-301", 3)
    assert not request.begin()


def test_an_request_that_runs_on_at_its_deadline_may_have_written() -> None:
    request = OverwriteRequest(1, Deadline.after(0.0))
    assert request.begin()
    done, fault = request.wait(rank=3)
    assert (done.begun, fault is None) == (True, False)
    request.finish(Overwritten(begun=False), None)  # too late: the first result stays
    assert request.wait(rank=3) == (done, fault)


def test_what_is_asked_of_an_staging_thread_without_that_source_or_that_has_ended_is_answered() -> None:
    overwrites, woken = OverwriteQueue(InPlaceSettings()), list[int]()
    overwrites.wake = lambda: woken.append(1)
    request = overwrites.submit(1, Deadline.after(60.0))
    assert woken == [1]
    assert overwrites.take() is None
    assert request.wait(0)[1] is not None
    waiting = overwrites.submit(2, Deadline.after(60.0))
    overwrites.close()
    for left in (waiting, overwrites.submit(3, Deadline.after(60.0))):
        done, fault = left.wait(0)
        assert fault is not None
        assert (done.begun, fault.code) == (False, "LW-205")
