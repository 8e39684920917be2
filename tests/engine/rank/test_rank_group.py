"""The group through shared memory: the sums of all ranks, the same bits on each, and an end to every wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch

from liveweight.engine.rank import shared_memory_group
from liveweight.engine.rank.shared_memory_group import SegmentUnshared, SharedGroup
from liveweight.errors import ChannelClosed

native = pytest.importorskip("liveweight.engine._shared")
WITHIN_S = 30.0


class Board:
    """A store for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, WITHIN_S)
            return self._values[key].encode()


class Others:
    """The group for what does not fit: it only says that it was asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.asked = rank, size, 0

    def add(self, part: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return part

    join = add


def together(size: int, work: Callable[[SharedGroup], object], timeout_s: float = WITHIN_S) -> list[object]:
    """Every rank does the work, in a thread of its own."""
    board = Board()

    def run(rank: int) -> object:
        return work(SharedGroup(Others(rank, size), board, timeout_s=timeout_s))

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]


def part(rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * turn + rank)
    rows, columns = 1 + turn % 5, 1 + turn % 37
    return torch.randn(rows, columns, generator=made).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_bits_turn_after_turn(size: int, dtype: torch.dtype) -> None:
    def work(group: SharedGroup) -> list[torch.Tensor]:
        results = []
        for turn in range(300):
            mine = part(group.rank, turn, dtype)
            results.append(group.add(mine) if turn % 2 else group.join(mine))
        return results

    answers: list[list[torch.Tensor]] = together(size, work)  # type: ignore[assignment]
    for turn in range(300):
        parts = [part(rank, turn, dtype) for rank in range(size)]
        if turn % 2:
            expected = parts[0].float()
            for other in parts[1:]:
                expected = expected + other.float()
            expected = expected.to(dtype)
        else:
            expected = torch.cat(parts, dim=-1)
        assert all(torch.equal(of_rank[turn], expected) for of_rank in answers)


def test_what_does_not_fit_goes_the_other_way() -> None:
    def work(group: SharedGroup) -> int:
        group.add(torch.zeros(shared_memory_group.SLOT_BYTES // 4 + 1))
        group.add(torch.zeros(4, dtype=torch.int64))
        group.join(torch.zeros(0, 4))
        group.add(torch.zeros(4, 6).t())
        others: Others = group._others  # type: ignore[assignment]
        return others.asked

    assert together(2, work) == [4, 4]


def test_a_rank_that_does_not_come_is_named() -> None:
    failed: Queue[str] = Queue()

    def work(group: SharedGroup) -> None:
        if group.rank:
            return
        with pytest.raises(ChannelClosed) as raised:
            group.add(torch.ones(8))
        failed.put(str(raised.value))

    together(3, work, timeout_s=0.2)
    assert failed.get_nowait().startswith("rank 1 did not come")


def test_memory_that_one_rank_cannot_map_is_used_by_none() -> None:
    class Blind(Board):
        def get(self, key: str) -> bytes:
            return b"/nowhere" if key == "segment" else super().get(key)

    board = Blind()

    def run(rank: int) -> None:
        with pytest.raises(SegmentUnshared):
            SharedGroup(Others(rank, 2), board, timeout_s=WITHIN_S)

    with ThreadPoolExecutor(2) as pool:
        assert [future.result() for future in [pool.submit(run, rank) for rank in range(2)]] == [None, None]


def test_the_sum_of_numbers_that_are_none_is_none() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], dtype=torch.bfloat16)

    def work(group: SharedGroup) -> torch.Tensor:
        return group.add(odd.clone())

    for answer in together(2, work):
        assert isinstance(answer, torch.Tensor)
        assert torch.isnan(answer[0])
        assert answer[1:].tolist() == [float("inf"), -float("inf"), 2.0]


@pytest.mark.parametrize(
    ("capacity", "rank", "size", "turn", "count"),
    [
        (64, 2, 2, 1, 4),
        (64, -1, 2, 1, 4),
        (64, 0, 65, 1, 4),
        (0, 0, 2, 1, 4),
        (60, 0, 2, 1, 4),
        (64, 0, 2, 0, 4),
        (64, 0, 2, 1, 400),
        (1 << 40, 0, 2, 1, 4),
    ],
)
def test_wrong_sizes_are_refused(capacity: int, rank: int, size: int, turn: int, count: int) -> None:
    segment = torch.zeros(4096 + 4 * 64 + 64, dtype=torch.uint8)
    aligned = segment[(-segment.data_ptr()) % 64 :].numpy()
    with pytest.raises(ValueError, match=r"rank|slot|segment"):
        native.add(aligned, capacity, rank, size, turn, torch.zeros(count).numpy(), False, 0.0)
