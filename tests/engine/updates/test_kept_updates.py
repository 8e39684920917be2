"""An engine that pulls an offer without the tensors that the trainer leaves out: it keeps its own, if they are the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import liveweight as lw
from liveweight.engine.engine import Engine
from liveweight.engine.updates.requested_update import RequestedVersion
from liveweight.engine.updates.verifying import VerificationRequest
from tests.support.engine.engines import Models, answers, greedy
from tests.support.programs.trainer_program import read_checkpoint

Start = Callable[..., Engine]
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.mark.parametrize("shadow", ["device", "none"])
def test_an_engine_pulls_what_is_offered_and_keeps_the_rest(
    start: Start, models: Models, short_path: Path, shadow: str
) -> None:
    old, new = (read_checkpoint(str(models.directory(seed=seed))) for seed in (0, 1))
    frozen = new | {EMBEDDINGS: old[EMBEDDINGS]}
    address = f"ipc://{short_path}/source.sock"
    engine = start(models.directory(), tp=2, updates={"shadow": shadow, "source": address})
    before = answers(engine, [[5, 6, 7]], greedy(8))[0].ids
    place = {"address": address, "secret": short_path / "secret", "directory": short_path / "source"}
    with lw.Publisher(frozen, keep=[EMBEDDINGS], **place) as source:  # type: ignore[arg-type]
        source.offer("trained")
        updated = engine.update_weights(RequestedVersion(call="c", pause="keep"))
        assert (updated.outcome, updated.kept) == ("committed", (EMBEDDINGS,))
        assert updated.tensors == len(frozen) - 1
        assert engine.verify(VerificationRequest()).verdict.match
        after = answers(engine, [[5, 6, 7]], greedy(8))[0].ids
        assert after != before
    with lw.Publisher(new, keep=[EMBEDDINGS], **place) as source:  # type: ignore[arg-type]
        source.offer("other")
        with pytest.raises(lw.LiveWeightError, match=rf"kept tensors differ.*{EMBEDDINGS}"):
            engine.update_weights(RequestedVersion(call="d", pause="keep"))
    assert answers(engine, [[5, 6, 7]], greedy(8))[0].ids == after
