"""What a real engine holds, verified: equal to the trainer's weights after a round, to those of before after an undo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.engine.updates.verifying import VerificationRequest
from liveweight.errors import DeadlineExceeded, ManifestMismatch, RankLost, WireError, WrongState
from tests.support.engine.engines import WITHIN_S, Arch, Models, ask, forking, greedy
from tests.support.engine.flipping_hook import FLIPPED, NAME
from tests.support.processes.fork_server import Zygote
from tests.support.processes.stopping import stop


def config_of(place: Path, model: Path, **settings: Any) -> EngineConfig:
    updates = Updates(address=f"ipc://{place}/engine.sock", secret_file=str(place / "secret"))
    return EngineConfig(model=str(model), threads=1, updates=updates, **settings)


def publisher(place: Path, engine: Engine, source: Path) -> lw.Publisher:
    return lw.Publisher(
        source, engines=[engine.address or ""], secret=place / "secret", directory=place / "trainer"
    )


@pytest.fixture
def damageable(zygote: Zygote, short_path: Path, models: Models) -> Iterator[Engine]:
    """An engine of two ranks whose weights can be damaged."""
    config = config_of(short_path, models.directory(), tp=2, hooks=(NAME,))
    with Engine(config, launch=forking(zygote)) as engine:
        yield engine


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("arch", "tied", "mtp"), [("qwen3", True, False), ("qwen3", False, True), ("qwen3_moe", True, False)]
)
def test_it_equals_the_trainers_digest_after_a_round_and_that_of_before_after_an_undo(
    zygote: Zygote, short_path: Path, models: Models, arch: Arch, tied: bool, mtp: bool, tp: int
) -> None:
    old, new = (models.directory(arch, tied=tied, mtp=mtp, seed=seed) for seed in (0, 1))
    with Engine(config_of(short_path, old, tp=tp), launch=forking(zygote)) as engine:
        first = engine.verify(VerificationRequest()).verdict
        assert (first.match, first.found, first.digest) == (True, engine.start, engine.start.digest)
        with publisher(short_path, engine, new) as trainer:
            report = trainer.publish("new")
            after = engine.verify(VerificationRequest())
            assert (after.verdict.match, after.compared_with) == (True, report.version)
            assert (after.verdict.found, after.verdict.digest) == (report.version, report.version.digest)
            assert trainer.verify().match is True
            trainer.undo()
            back = engine.verify(VerificationRequest()).verdict
            assert (back.match, back.found, back.digest) == (True, engine.start, engine.start.digest)
            assert trainer.verify().match is False


def test_requests_are_answered_while_it_is_verified(zygote: Zygote, short_path: Path, models: Models) -> None:
    with Engine(config_of(short_path, models.directory(), tp=2), launch=forking(zygote)) as engine:
        alone = ask(engine, [5, 6, 7], greedy(300)).wait().ids
        running = ask(engine, [5, 6, 7], greedy(300))
        running.piece()
        while running.last is None:
            assert engine.verify(VerificationRequest()).verdict.match is True
            running.piece()
        assert running.ids == alone


def test_a_flipped_bit_of_a_rank_is_named_and_a_round_heals_it(
    damageable: Engine, short_path: Path, models: Models
) -> None:
    engine = damageable
    os.kill(engine.pids[1], signal.SIGUSR1)
    ask(
        engine, [5, 6, 7], greedy(1)
    ).wait()  # the rank's main thread, which runs the handler, has taken a step since
    found = engine.verify(VerificationRequest()).verdict
    assert (found.match, found.found, found.serving) == (False, None, engine.start)
    assert [(one.name, one.ranks) for one in found.mismatches] == [(FLIPPED, (1,))]
    assert engine.verify(VerificationRequest(names=("model.embed_tokens.weight",))).verdict.match is True
    with publisher(short_path, engine, models.directory(seed=1)) as trainer:
        trainer.publish("new")
    assert engine.verify(VerificationRequest()).verdict.match is True


def test_a_stopped_rank_is_named_and_goes_on_afterwards(damageable: Engine) -> None:
    stop(damageable.pids[1])
    try:
        with pytest.raises(DeadlineExceeded, match="rank 1 to digest its weights"):
            damageable.verify(VerificationRequest(timeout_s=1.0))
    finally:
        os.kill(damageable.pids[1], signal.SIGCONT)
    assert damageable.verify(VerificationRequest(timeout_s=WITHIN_S)).verdict.match is True


def test_a_killed_rank_is_named(damageable: Engine) -> None:
    os.kill(damageable.pids[1], signal.SIGKILL)
    with pytest.raises((RankLost, WireError), match=r"rank 1 \(process"):
        damageable.verify(VerificationRequest(timeout_s=WITHIN_S))


def test_names_without_a_tensor_and_engines_without_updates_or_a_source_refuse_it(
    zygote: Zygote, short_path: Path, models: Models
) -> None:
    with Engine(config_of(short_path, models.directory()), launch=forking(zygote)) as engine:
        with pytest.raises(ManifestMismatch, match="nobody unexpected"):
            engine.verify(VerificationRequest(names=("nobody",)))
        with pytest.raises(WrongState, match="without a source"):
            engine.verify(VerificationRequest(against="source"))
    config = EngineConfig(model=str(models.directory()), threads=1)
    with (
        Engine(config, launch=forking(zygote)) as engine,
        pytest.raises(WrongState, match="without live updates"),
    ):
        engine.verify(VerificationRequest())


def test_what_the_source_offers_can_be_compared_with(
    zygote: Zygote, short_path: Path, models: Models
) -> None:
    source = f"ipc://{short_path}/source.sock"
    updates = Updates(
        address=f"ipc://{short_path}/engine.sock", secret_file=str(short_path / "secret"), source=source
    )
    config = EngineConfig(model=str(models.directory()), threads=1, tp=2, updates=updates)
    with (
        Engine(config, launch=forking(zygote)) as engine,
        lw.Publisher(
            models.directory(),
            engines=[],
            address=source,
            secret=short_path / "secret",
            directory=short_path / "trainer",
        ) as trainer,
    ):
        offered = trainer.offer("same")
        answer = engine.verify(VerificationRequest(against="source"))
        assert (answer.verdict.match, answer.compared_with) == (True, offered)
        assert answer.verdict.digest == engine.start.digest
        with pytest.raises(lw.LiveWeightError, match="same"):
            engine.verify(VerificationRequest(against="source", version="other"))
