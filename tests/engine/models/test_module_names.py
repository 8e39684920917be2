"""transformers' own modules as sources of the engine: what they call their tensors, and what it answers then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import liveweight as lw
from liveweight.engine.engine import Engine
from tests.support.engine.engines import Logits, Models, answers, first_difference, greedy

PROMPTS = [[5, 6, 7, 8], [300, 20, 7, 7, 7, 100], list(range(40, 75))]


def module_of(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return loaded


def differences(engine: Engine, logits: Logits) -> list[str | None]:
    """Where the engine's greedy answers are not transformers'."""
    found = answers(engine, PROMPTS, greedy(24))
    return [first_difference(logits, prompt, a.ids) for prompt, a in zip(PROMPTS, found, strict=True)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("offer", ["frozen", "live"])
def test_a_mixture_of_experts_is_published_from_transformers_module(
    start: Callable[..., Engine],
    publisher: Callable[..., lw.Publisher],
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    tp: int,
    offer: Literal["frozen", "live"],
) -> None:
    old, new = models.directory("qwen3_moe"), models.directory("qwen3_moe", seed=1)
    engine, module = start(old, tp=tp), module_of(new)
    stacked = [name for name, _ in module.named_parameters() if "experts" in name]
    assert {name.rpartition(".")[2] for name in stacked} == {"gate_up_proj", "down_proj"}
    with lw.share_module(module) as shared:
        source = publisher(engine, shared if offer == "live" else module, offer=offer)
        report = source.publish("new")
        assert (report.offer, report.verified) == (offer, True)
        assert differences(engine, transformers_logits(new)) == [None] * len(PROMPTS)
        assert any(differences(engine, transformers_logits(old)))
        with torch.no_grad():  # a step of training, in place
            for name in stacked:
                module.get_parameter(name).mul_(1.5)
        source.publish("later")
        assert differences(engine, _logits(module)) == [None] * len(PROMPTS)
        source.close()


def test_a_module_without_a_draft_is_published_to_an_engine_that_keeps_its_own(
    start: Callable[..., Engine],
    publisher: Callable[..., lw.Publisher],
    models: Models,
    transformers_logits: Callable[[Path], Logits],
) -> None:
    new = models.directory("qwen3_moe", seed=1)
    engine = start(models.directory("qwen3_moe", mtp=True), tp=2, updates={"draft_weights": "keep"})
    report = publisher(engine, module_of(new)).publish("new")
    assert report.replicas[0].kept == ("draft",)
    assert differences(engine, transformers_logits(new)) == [None] * len(PROMPTS)
    assert engine.status().counts.drafted_tokens > 0


def test_stacked_experts_are_cast_as_other_tensors_are(
    start: Callable[..., Engine], publisher: Callable[..., lw.Publisher], models: Models
) -> None:
    new = models.directory("qwen3_moe", seed=1)
    engine = start(models.directory("qwen3_moe"), dtype="bfloat16")
    with lw.share_module(module_of(new)) as shared:
        source = publisher(engine, shared, offer="live")
        assert (
            source.publish("new").offer == "frozen"
        )  # experts in another dtype cannot be read where they lie
        source.close()
    expected = start(new, dtype="bfloat16")
    assert [a.ids for a in answers(engine, PROMPTS, greedy(24))] == [
        a.ids for a in answers(expected, PROMPTS, greedy(24))
    ]


def test_a_receiver_that_holds_the_same_module_is_offered_it_as_it_is(
    short_path: Path, models: Models
) -> None:
    new = models.directory("qwen3_moe", seed=1)
    held = module_of(models.directory("qwen3_moe"))
    secret = short_path / "secret"
    with (
        lw.Receiver(held, address=f"ipc://{short_path}/receiver.sock", secret=secret) as receiver,
        lw.Publisher(
            module_of(new), engines=[receiver.address], secret=secret, directory=short_path / "trainer"
        ) as source,
    ):
        source.offer("new")
        assert any(receiver.at_boundary(1.0) is not None for _ in range(60))
        source.wait()
    for (name, ours), theirs in zip(held.named_parameters(), module_of(new).parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def _logits(module: Any) -> Logits:
    def logits(tokens: Any) -> torch.Tensor:
        with torch.no_grad():
            table: torch.Tensor = module(torch.tensor([list(tokens)])).logits[0]
        return table

    return logits
