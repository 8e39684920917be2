"""The same call with a real vLLM server: TRL's rollouts come from vLLM's own route, and liveweight publishes into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import liveweight as lw
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import VLLM_TINY
from liveweight.errors import TrainerRefused
from liveweight.integrations.trl import attach
from tests.trl.harness import logged, make_trainer
from tests.vllm.serving import VLLM_PYTHON, Server, served

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def vllm_model(place: Path) -> Path:
    """A checkpoint that vLLM serves on a CPU."""
    directory = place / "vllm-model"
    init_model(directory, VLLM_TINY)
    return directory


@pytest.fixture(scope="module")
def server(vllm_model: Path, place: Path) -> Iterator[Server]:
    """One vLLM for all tests: it takes long to start."""
    if VLLM_PYTHON is None:
        pytest.skip("needs vLLM in an environment of its own: make soak-trl")
    options = ("--logprobs-mode", "processed_logprobs")
    with served(vllm_model, place, dtype="float32", options=options) as started:
        yield started


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollouts_of_vllm_are_drawn_by_the_trainers_weights(
    vllm_model: Path, server: Server, tmp_path: Path, temperature: float
) -> None:
    trainer = make_trainer(vllm_model, tmp_path, temperature=temperature, max_steps=3)
    with attach(trainer, engines=[lw.vllm(server.url)], secret=server.secret) as attached:
        trainer.train()
        assert attached.publisher is not None
        assert attached.publisher.verify().match is not False
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-3
    assert len(logged(trainer, "weight_sync/total_s")) == 3
    assert server.get("/weight_info")["weight_version"] == "step_2"


def test_what_vllm_knows_besides_is_passed_on(vllm_model: Path, server: Server, tmp_path: Path) -> None:
    trainer = make_trainer(
        vllm_model, tmp_path, generation_kwargs={"min_tokens": 8, "stop_token_ids": list(range(400))}
    )
    with attach(trainer, engines=[lw.vllm(server.url)], secret=server.secret):
        _, answers, found, _ = trainer.vllm_generation.generate([[5, 6, 7]] * 4, None, 4)
    assert {len(answer) for answer in answers} == {8}
    assert {len(one) for one in found} == {8}


def test_a_vllm_whose_logprobs_are_not_of_the_draw_is_refused(
    vllm_model: Path, place: Path, tmp_path: Path
) -> None:
    with served(vllm_model, place, dtype="float32") as raw:
        trainer = make_trainer(vllm_model, tmp_path, temperature=0.7)
        with pytest.raises(TrainerRefused, match=r"raw_logprobs.*--logprobs-mode processed_logprobs"):
            attach(trainer, engines=[lw.vllm(raw.url)], secret=raw.secret)
