"""Buckets written in place: what memory holds after each of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from liveweight.devices.memory import Memory
from liveweight.errors import Unavailable
from liveweight.lab.torn_demo.in_place_update import NAME, live_memory, share_live, write


@pytest.mark.parametrize("buckets", [1, 2, 3, 8, 200])
def test_after_each_bucket_so_much_is_new_and_the_rest_is_old(buckets: int) -> None:
    sizes = (100, 64)
    sources = [Memory.from_array(np.full(size, 1, np.uint8)) for size in sizes]
    targets = [Memory.from_array(np.zeros(size, np.uint8)) for size in sizes]
    for written in write(sources, targets, buckets):
        for size, target in zip(sizes, targets, strict=True):
            new = size * written // buckets
            assert target.bytes().tolist() == [1] * new + [0] * (size - new)
    assert written == buckets


def test_a_trainer_finds_the_weights_of_a_rank_by_its_process_and_writes_them() -> None:
    module = torch.nn.Linear(8, 4, bias=False)
    share_live(cast(Any, module))
    try:
        target = live_memory(os.getpid())
        target.bytes()[:] = np.frombuffer(np.full(32, 7.0, np.float32), np.uint8)
        assert module.weight.flatten().tolist() == [7.0] * 32
    finally:
        close_live()


def test_a_process_without_such_weights_is_named() -> None:
    with pytest.raises(Unavailable, match=f"process {os.getpid()} has no weights"):
        live_memory(os.getpid())


def close_live() -> None:
    """Let go of the descriptor, which a rank keeps until it ends."""
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and NAME in str(path.readlink()):
            os.close(int(path.name))
