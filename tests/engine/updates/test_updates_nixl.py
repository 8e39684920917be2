"""Live updates in the engine over one-sided reads: real ranks, fused and sliced parameters, requests running."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liveweight.engine.engine import Engine
from liveweight.engine.serving.step_stream import weights_text
from tests.support.engine.engines import WITHIN_S, Logits, Models
from tests.support.engine.versions import Clients, mixtures

pytest.importorskip("nixl")


@pytest.mark.parametrize("mode", ["gdr", pytest.param("rdma", marks=pytest.mark.soak)])
def test_no_token_comes_from_a_mixture_while_rounds_over_nixl_commit(
    start: Callable[..., Engine],
    publisher: Any,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    mode: str,
) -> None:
    """The soak has rdma, too: the same reads, into a buffer first, which tests/contract tries in every run."""
    directories = [models.directory(), models.directory(seed=1)]
    engine = start(directories[0], tp=2, updates={"staging_threads": 2})
    logits = {weights_text(engine.start): transformers_logits(directories[0])}
    publishers = [publisher(engine, directory, transfer_mode=mode) for directory in directories]
    with Clients(engine, 3, 40) as asking:
        for number in range(4):
            report = publishers[(number + 1) % 2].publish(number)
            assert (report.mode, report.verified) == (mode, True)
            logits[weights_text(report.version)] = transformers_logits(directories[(number + 1) % 2])
            assert asking.began.acquire(timeout=WITHIN_S)
    assert mixtures(asking.answers, logits.__getitem__) == []
    assert engine.undo(WITHIN_S)
