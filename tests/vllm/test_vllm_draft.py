"""A real vLLM that drafts with a model of its own: the draft is of the version that was published, which its guesses show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import liveweight as lw
from liveweight.integrations.vllm.draft_model import PREFIX
from tests.vllm.models import llama
from tests.vllm.serving import WITHIN_S, Answer, Server, served

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
TOKENS = 40


def drafting(draft: Path) -> tuple[str, str]:
    """vLLM's option to guess three tokens ahead with that model."""
    return "--speculative-config", json.dumps(
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    )


def counted(server: Server, what: str) -> float:
    return server.counted(f"spec_decode_num_{what}")


def guessed(server: Server) -> float:
    """The share of the draft's guesses for an answer that is right."""
    before = counted(server, "accepted_tokens"), counted(server, "draft_tokens")
    server.answer(TOKENS, prompt=(9, 8, 7))
    return (counted(server, "accepted_tokens") - before[0]) / (counted(server, "draft_tokens") - before[1])


def test_the_draft_is_updated_with_the_main_model_and_kept_where_a_trainer_has_none(
    place: Path, base: Path, new: Path, fresh: Answer
) -> None:
    main = llama(1).state_dict()
    both = {**main, **{PREFIX + name: tensor for name, tensor in main.items()}}
    with served(base, place, options=drafting(base)) as server:
        assert guessed(server) > 0.7, "a draft that is the model itself"
        with lw.Publisher(
            new, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S
        ) as trainer:
            report = trainer.publish("main")
            assert report.replicas[0].kept == ("draft",)
            assert server.answer()[0] == fresh[0]
            assert guessed(server) < 0.3, "the draft is that of the start"
        with lw.Publisher(
            both, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S
        ) as trainer:
            trainer.publish("both")
            assert server.answer()[0] == fresh[0]
            assert guessed(server) > 0.7, "the draft is of the same version"
            assert trainer.verify().match
            trainer.undo()
            assert guessed(server) < 0.3
