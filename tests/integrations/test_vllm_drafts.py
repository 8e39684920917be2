"""A vLLM that drafts with a model of its own, without vLLM: both models are of one version, or the draft stays as it is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import liveweight as lw
from liveweight.errors import ManifestMismatch, Refused, RoundFailed
from liveweight.integrations.vllm.draft_model import PREFIX
from tests.support.vllm_workers import BASE, MET, NEW, WHOLE, Four, Started, VllmWorkers, publisher, weights


def with_draft(
    main: Mapping[str, torch.Tensor], draft: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {**main, **{PREFIX + name: tensor for name, tensor in draft.items()}}


def drafts_with(vllm: VllmWorkers, wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether every worker's draft model is that, to the bit."""
    return all(
        worker.drafts.keys() == wanted.keys()
        and all(torch.equal(worker.drafts[name], tensor) for name, tensor in wanted.items())
        for worker in vllm.workers
    )


DRAFT, BETTER = weights(7), weights(8)
BOTH = with_draft(BASE, DRAFT)


@pytest.mark.parametrize("world", [1, 2])
def test_both_models_are_installed_together_and_go_back_together(started: Started, world: int) -> None:
    vllm = started(world, BOTH)
    with publisher(vllm, with_draft(NEW, BETTER)) as trainer:
        trainer.publish(1)
        assert vllm.holds(NEW)
        assert drafts_with(vllm, BETTER)
        assert vllm.rests()
        assert vllm.calls == [*MET, "start", "finish", *WHOLE], (
            "handed over once, by an update that installs nothing"
        )
        assert trainer.verify().match
        trainer.undo()
        assert vllm.holds(BASE)
        assert drafts_with(vllm, DRAFT)


def test_a_draft_that_the_trainer_does_not_have_stays_through_rounds_and_undo(started: Started) -> None:
    vllm = started(2, BOTH)
    with publisher(vllm, with_draft(NEW, BETTER)) as trainer:
        trainer.publish("both")
    with publisher(vllm, weights(3)) as trainer:
        report = trainer.publish("main")
        assert report.replicas[0].kept == ("draft",)
        assert vllm.holds(weights(3))
        assert drafts_with(vllm, BETTER)
        assert trainer.verify().match
        trainer.undo()
        assert vllm.holds(NEW)
        assert drafts_with(vllm, BETTER)


def test_at_first_a_kept_draft_is_that_of_the_start(started: Started) -> None:
    vllm = started(1, BOTH)
    with publisher(vllm, NEW) as trainer:
        trainer.publish(1)
        assert vllm.holds(NEW)
        assert drafts_with(vllm, DRAFT)


def test_a_part_of_a_draft_is_refused_by_name(started: Started) -> None:
    vllm = started(1, BOTH)
    offered = with_draft(NEW, BETTER)
    del offered["draft.lm_head.weight"]
    with pytest.raises(ManifestMismatch, match=r"draft\.lm_head\.weight missing"), publisher(vllm, offered):
        pass


def test_an_install_that_fails_puts_both_models_back(started: Started) -> None:
    vllm = started(1, BOTH)
    with publisher(vllm, with_draft(NEW, BETTER)) as trainer:
        vllm.workers[0].draft_failures = 1
        with pytest.raises(RoundFailed, match="the draft does not load"):
            trainer.publish("failing")
        assert vllm.holds(BASE)
        assert drafts_with(vllm, DRAFT)
        trainer.publish("next")
        assert vllm.holds(NEW)
        assert drafts_with(vllm, BETTER)


def test_a_client_that_cannot_hand_the_draft_over_updates_the_main_model_and_refuses_a_draft(
    started: Started,
) -> None:
    vllm = started(1, BOTH)
    engines = [lw.vllm(Four(vllm))]
    with (
        pytest.raises(Refused, match="start_draft_weight_update"),
        lw.Publisher(with_draft(NEW, BETTER), engines=engines, secret=vllm.secret),
    ):
        pass
    with lw.Publisher(NEW, engines=engines, secret=vllm.secret) as trainer:
        trainer.publish(1)
    assert vllm.holds(NEW)
    assert drafts_with(vllm, DRAFT)
