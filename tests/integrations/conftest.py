"""What tests of processes share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.vllm_workers import BASE, Started, VllmWorkers, Weights


@pytest.fixture
def started(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """A vLLM of so many workers; all end with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    torch.set_num_threads(1)
    begun: list[VllmWorkers] = []

    def start(world: int, start: Weights = BASE) -> VllmWorkers:
        begun.append(VllmWorkers(world, short_path / "secret", start))
        return begun[-1]

    yield start
    for workers in begun:
        workers.close()
