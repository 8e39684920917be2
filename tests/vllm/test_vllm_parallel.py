"""Models of other kinds, and several workers, in real vLLM servers: each takes two starts, so these are long."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.errors import DeadlineExceeded, RoundFailed
from liveweight.integrations.vllm.server_process import free_port
from tests.support.processes.stopping import stop
from tests.vllm.models import llama, qwen3_moe, saved
from tests.vllm.serving import WITHIN_S, Answer, Server, served

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

Build = Callable[[int], Any]


def tied_llama(seed: int) -> Any:
    """Its head is its embedding."""
    return llama(seed, tied=True)


def answers(model: Path, place: Path, tp: int) -> Answer:
    """Of a vLLM that was started on this."""
    with served(model, place, tp=tp) as started:
        return started.answer()


def publishes(server: Server, source: object, label: str, *, timeout_s: float = WITHIN_S) -> None:
    with lw.Publisher(
        source, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=timeout_s
    ) as trainer:
        trainer.publish(label)
        assert trainer.verify().match


@pytest.mark.parametrize(
    ("build", "tp"),
    [(llama, 2), (tied_llama, 1), (qwen3_moe, 1), (qwen3_moe, 2)],
    ids=["dense-2", "tied-1", "experts-1", "experts-2"],
)
def test_what_is_published_answers_as_a_fresh_vllm(
    place: Path, tmp_path: Path, build: Build, tp: int
) -> None:
    base, new = saved(build(0), tmp_path / "base"), saved(build(1), tmp_path / "new")
    fresh = answers(new, place, tp)
    with served(base, place, tp=tp) as server:
        before = server.answer()
        assert before != fresh
        publishes(server, build(1), "step_1")  # a module: experts stacked, names tied, as a trainer has them
        assert server.answer() == fresh
        publishes(server, base, "step_2")
        assert server.answer() == before
        if tp > 1:
            _a_worker_that_does_not_vote(server, before, new)
            _a_worker_that_fails_to_install(server, before, new)
            publishes(server, new, "at_last")
            assert server.answer() == fresh


def test_a_head_that_shares_the_embeddings_is_packed_anew(place: Path, tmp_path: Path) -> None:
    base, new = (saved(tied_llama(seed).float(), tmp_path / str(seed)) for seed in (0, 1))
    with served(new, place, dtype="float32") as server:  # which vLLM packs on every CPU
        fresh = server.answer()
    with served(base, place, dtype="float32") as server:
        publishes(server, new, "step_1")
        assert server.answer() == fresh


def _a_worker_that_does_not_vote(server: Server, before: Answer, new: Path) -> None:
    pid = server.workers()[1]
    with lw.Publisher(
        new, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S
    ) as trainer:
        trainer.settings = replace(trainer.settings, timeout_s=10.0)
        stop(pid)
        try:
            with pytest.raises(RoundFailed, match="rank 1") as failed:
                trainer.publish("unheard")
        finally:
            os.kill(pid, signal.SIGCONT)
    assert failed.value.code == DeadlineExceeded.code
    assert server.answer() == before


def _a_worker_that_fails_to_install(server: Server, before: Answer, new: Path) -> None:
    server.tell_workers("fail_loading", "7", "1")
    with pytest.raises(RoundFailed, match="a test wants"):
        publishes(server, new, "failing")
    assert server.answer() == before


def test_a_server_that_was_started_again_is_met_again_and_brought_up_to_date(
    place: Path, base: Path, new: Path, fresh: Answer
) -> None:
    port = free_port()
    with served(base, place, port=port) as first:
        trainer = lw.Publisher(new, engines=[lw.vllm(first.url)], secret=first.secret, timeout_s=WITHIN_S)
        with trainer:
            trainer.publish("step_1")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with served(base, place, port=port) as again:
                assert again.answer() != fresh
                assert not trainer.publish("step_1").unchanged
                assert again.answer() == fresh
                assert again.get("/weight_info") == {"weight_version": "step_1"}
