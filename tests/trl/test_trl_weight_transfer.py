"""The weight transfer of an AsyncGRPOTrainer: TRL's own `_sync_weight`, with frozen embeddings, which TRL does not send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from liveweight.errors import KeptDiffers, ManifestMismatch, TrainerRefused, Unavailable, WrongState
from liveweight.integrations.trl import WeightTransfer
from tests.trl.harness import ServedEngine
from tests.trl.rank_processes import exit_codes, heard, tell_all, trainer_ranks

EMBEDDINGS = "model.embed_tokens.weight"


def loaded(model: Path) -> Any:
    """The model with frozen embeddings."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.get_input_embeddings().weight.requires_grad_(requires_grad=False)
    return made


def trained(model: Any) -> Any:
    """What TRL sends."""
    return ((name, one.detach()) for name, one in model.named_parameters() if one.requires_grad)


@pytest.mark.parametrize(("spread", "world"), [("whole", 1), ("fsdp2", 2)])
def test_trls_own_sync_is_published_and_fails_at_a_lost_engine(
    model: Path, tmp_path: Path, place: Path, spread: str, world: int
) -> None:
    with (
        ServedEngine(model, place) as own,
        trainer_ranks("sync_program", str(model), own.url, spread, place=tmp_path, world=world) as ranks,
    ):
        first, *others = (heard(rank, tmp_path) for rank in ranks)
        assert (first["error"], first["verified"], first["version"]) == (None, True, 1)
        assert (first["label"], first["kept"]) == ("version_1", [EMBEDDINGS])
        assert all(other["error"] is None for other in others)
        assert own.weights()["version"]["label"] == "version_1"
        own.kill()
        tell_all(ranks)
        first, *others = (heard(rank, tmp_path) for rank in ranks)
        assert own.url in first["error"]
        assert (first["version"], first["label"]) == (1, "version_1")  # TRL did not count it
        assert all(other["error"] is None for other in others)  # and nobody hung
        assert exit_codes(ranks) == [0] * world


def test_a_frozen_tensor_that_differs_is_refused_by_name_before_anything_is_sent(
    model: Path, engine: ServedEngine
) -> None:
    net = loaded(model)
    with torch.no_grad():
        net.get_input_embeddings().weight[0, 0] += 1.0
    before = engine.rounds()
    with pytest.raises(KeptDiffers, match=rf"{EMBEDDINGS}$"):
        WeightTransfer([engine.url], model=net).init_weight_transfer()
    assert engine.rounds() == before


def test_a_failed_sync_raises_runs_the_iterator_and_the_next_one_succeeds(
    model: Path, engine: ServedEngine
) -> None:
    net = loaded(model)
    transfer = WeightTransfer([engine.url], model=net)
    transfer.init_weight_transfer()
    given: list[str] = []

    def cut() -> Any:
        for name, tensor in trained(net):
            given.append(name)
            yield name, tensor if len(given) > 1 else tensor[:1]

    def failing() -> Any:
        yield next(trained(net))
        raise RuntimeError("out of memory")

    with pytest.raises(ManifestMismatch, match="expected float32"):
        transfer.send_weights(cut())
    assert len(given) == sum(one.requires_grad for one in net.parameters())
    with pytest.raises(Unavailable, match=r"the iterator failed after .*out of memory"):
        transfer.send_weights(failing())
    transfer.pause()
    transfer.send_weights(trained(net))
    transfer.resume()
    assert transfer.report is not None
    assert transfer.report.version.label == "version_3"
    transfer.destroy()
    transfer.destroy()
    ended = iter([("w", torch.ones(1))])
    with pytest.raises(WrongState):
        transfer.send_weights(ended)
    assert next(ended, None) is None


def test_what_cannot_be_meant_is_refused(place: Path) -> None:
    del place
    with pytest.raises(TrainerRefused, match="give one of them"):
        WeightTransfer(["http://127.0.0.1:1"], model=torch.nn.Linear(1, 1), keep=["a"])
    with pytest.raises(TrainerRefused, match="group"):
        WeightTransfer(["http://127.0.0.1:1"], group=None)
