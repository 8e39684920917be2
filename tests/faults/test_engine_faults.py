"""Faults while an engine serves: at every step of a round, with both kinds of offer. Real ranks, real trainers, real clients.

Whatever happens, no token is a mixture, every call ends, the old version goes on where its ranks live, and the next round succeeds.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.engine.updates.verifying import VerificationRequest
from liveweight.errors import LiveWeightError, RankLost
from liveweight.wire.messages import Verdict
from tests.support.engine.engine_scene import MOMENTS, Moment, Scene, directory_of, label_of, scene
from tests.support.engine.engines import WITHIN_S, Logits, Models, answers, greedy
from tests.support.engine.versions import Clients, mixtures
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import Zygote
from tests.support.processes.stopping import stop
from tests.support.rounds import publish_when_free

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
SHORT_S = 1.5
OFFERS = pytest.mark.parametrize("offer", ["live", "frozen"])
FROZEN_AND_IN_THE_SOAK_LIVE = pytest.mark.parametrize(
    "offer", [pytest.param("live", marks=pytest.mark.soak), "frozen"]
)
"""For what others do meanwhile, which the leader decides, whatever ranks read."""
AT = pytest.mark.parametrize("moment", MOMENTS)
Make = Callable[..., Scene]


@pytest.fixture
def make(cluster: Cluster, zygote: Zygote, models: Models) -> Iterator[Make]:
    """Makes the scene of a test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(scene(cluster, zygote, models, **options))


class Judge:
    """Says whether tokens are what their own version draws."""

    def __init__(self, logits: Callable[[Path], Logits], place: Scene) -> None:
        self._logits, self._place = logits, place

    def no_mixture(self, clients: Clients) -> None:
        """In nothing that the clients got."""
        assert clients.answers
        assert mixtures(clients.answers, self._of) == []

    def serves(self, label: int) -> None:
        """The engine answers new requests from exactly that version, and says so."""
        new = answers(self._place.engine, PROMPTS, greedy(16))
        assert mixtures(list(zip(PROMPTS, new, strict=True)), self._of) == []
        assert {label_of(token.weights) for answer in new for token in answer.tokens} == {label}

    def _of(self, weights: str) -> Logits:
        return self._logits(directory_of(self._place, weights))


@pytest.fixture
def judge(transformers_logits: Callable[[Path], Logits]) -> Callable[[Scene], Judge]:
    """Judges by transformers."""
    return lambda place: Judge(transformers_logits, place)


@OFFERS
@AT
def test_a_killed_trainer(make: Make, judge: Any, offer: str, moment: Moment) -> None:
    place = make(offer=offer, timeout_s=4.0, lease_s=2.0)
    with place.clients() as clients, place.held_at(moment, 2) as held:
        place.trainer.kill()
        if moment == "voting":
            held.gone()
        held.go()
        clients.went_on()
    place.trainer = place.start_trainer(offer=offer, run="successor")
    if moment != "committing":
        judge(place).serves(1)
    assert "error" not in publish_when_free(place.trainer, 3)
    judge(place).serves(3)
    judge(place).no_mixture(clients)


@OFFERS
@AT
def test_a_killed_rank(make: Make, judge: Any, offer: str, moment: Moment) -> None:
    place = make(offer=offer, timeout_s=10.0)
    with place.clients() as clients:
        with place.held_at(moment, 2) as held:
            os.kill(place.engine.pids[1], signal.SIGKILL)
            if moment not in ("open", "voting"):
                held.gone()
            held.go()
            error = place.trainer.end(held.call)["error"]
        assert error["code"] in ("LW-205", "LW-602")  # gone; or gone after it was told to commit
    assert_replaced(place, judge(place), clients)


@OFFERS
@AT
def test_a_stopped_rank(make: Make, judge: Any, offer: str, moment: Moment) -> None:
    place = make(offer=offer, timeout_s=3.0, lease_s=2.0)
    with place.clients() as clients:
        with place.held_at(moment, 2) as held:
            stop(place.engine.pids[1])
            if moment not in ("open", "voting"):
                held.gone()
            held.go()
            error = place.trainer.end(held.call)["error"]
        assert error["code"] in ("LW-301", "LW-205", "LW-602"), error
    assert_replaced(place, judge(place), clients)


def assert_replaced(place: Scene, judge: Judge, clients: Clients) -> None:
    """The engine reports that it is lost; its replacement takes the same trainer's next round."""
    with pytest.raises(RankLost, match="rank 1"):
        answers(place.engine, PROMPTS, greedy(4))[0].finish  # noqa: B018
    judge.no_mixture(clients)
    place.engine.stop()
    place.start_engine()
    assert "error" not in publish_when_free(place.trainer, 3)
    judge.serves(3)


@OFFERS
@AT
def test_a_bit_flipped_in_the_shadow(make: Make, judge: Any, offer: str, moment: Moment) -> None:
    place = make(offer=offer)
    with place.clients() as clients, place.held_at(moment, 2) as held:
        place.rank.ask("damage")
        held.go()
        answer = place.trainer.end(held.call)
    if moment == "verifying":
        assert (answer["error"]["code"], answer["error"]["serving"]) == ("LW-401", "1")
        judge(place).serves(1)
    else:
        assert "error" not in answer
    if moment in ("open", "staging"):
        judge(place).serves(2)  # staged over
    if moment != "voting":
        judge(place).no_mixture(clients)
    if moment == "committing":
        assert verdict(place).match
        place.engine.undo(WITHIN_S)  # the shadow is the way back by then
    # Nothing reads a shadow again once it was verified; what is installed can be verified at any time.
    damaged = moment in ("voting", "committing")
    assert (verdict(place).match, len(verdict(place).mismatches)) == (not damaged, int(damaged))
    assert "error" not in place.trainer.ask("publish", label=3)
    judge(place).serves(3)
    assert verdict(place).match


def verdict(place: Scene) -> Verdict:
    """What the engine finds when it verifies its weights."""
    return place.engine.verify(VerificationRequest()).verdict


@OFFERS
@AT
def test_a_deadline_that_is_too_short(make: Make, judge: Any, offer: str, moment: Moment) -> None:
    place = make(offer=offer, timeout_s=SHORT_S, lease_s=SHORT_S)
    with place.clients() as clients, place.held_at(moment, 2) as held:
        if moment == "voting":  # the trainer itself is stopped until its time is over
            threading.Event().wait(SHORT_S + 0.5)
            held.go()
        error = place.trainer.end(held.call)["error"]
        held.go()
        clients.went_on()
    if moment == "committing" and error["code"] == "LW-602":
        pass  # the trainer gave up before the engine's answer, which took the ranks back, had arrived
    else:
        assert (error["code"], error["serving"]) == ("LW-301", "1")
    judge(place).serves(1)
    patient = place.start_trainer(offer=offer, run="patient")
    assert "error" not in publish_when_free(patient, 3)
    judge(place).serves(3)
    judge(place).no_mixture(clients)


@OFFERS
@AT
def test_a_killed_api_server(make: Make, judge: Any, offer: str, moment: Moment) -> None:
    place = make(offer=offer, apart=True, timeout_s=10.0)
    with place.held_at(moment, 2) as held:
        assert place.program is not None
        place.program.kill()
        if moment != "voting":
            held.gone()
        held.go()
        error = place.trainer.end(held.call)["error"]
    assert error["code"] in ("LW-205", "LW-602")  # gone; or gone after it was told to commit
    for pid in place.pids:
        ended(pid)
    place.start_engine()
    assert "error" not in publish_when_free(place.trainer, 3)
    judge(place).serves(3)


def ended(pid: int) -> None:
    """Wait until that process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(WITHIN_S * 1000)
    os.close(descriptor)


@FROZEN_AND_IN_THE_SOAK_LIVE
@AT
@pytest.mark.parametrize("source", ["second", "wrong"])
def test_another_publisher_in_the_middle(
    make: Make, judge: Any, models: Models, cluster: Cluster, offer: str, moment: Moment, source: str
) -> None:
    """The soak has it with live offers, too."""
    place = make(offer=offer)
    other = models.directory(seed=3) if source == "second" else models.directory(tied=False)

    def publish() -> LiveWeightError:
        with (
            pytest.raises(LiveWeightError) as caught,
            lw.Publisher(
                other,
                engines=[cluster.address()],
                secret=cluster.secret,
                directory=cluster.directory / "other",
            ) as second,
        ):
            second.publish(9)
        return caught.value

    with place.clients() as clients, place.held_at(moment, 2) as held:
        error = held.meanwhile(publish)
        held.go()
        assert "error" not in place.trainer.end(held.call)
    assert error.code == ("LW-106" if source == "second" else "LW-101")
    judge(place).serves(2)
    judge(place).no_mixture(clients)
    assert "error" not in place.trainer.ask("publish", label=3)
    judge(place).serves(3)


@FROZEN_AND_IN_THE_SOAK_LIVE
@AT
@pytest.mark.parametrize("act", ["pause", "resume", "abort", "undo"])
def test_an_operator_in_the_middle(make: Make, judge: Any, offer: str, moment: Moment, act: str) -> None:
    """The soak has it with live offers, too."""
    place = make(offer=offer)
    engine = place.engine
    acts: dict[str, Callable[[], object]] = {
        "pause": lambda: engine.pause("keep", WITHIN_S),
        "resume": engine.resume,
        "abort": engine.abort_requests,
        "undo": lambda: refused(lambda: engine.undo(WITHIN_S)),
    }
    with place.clients() as clients:
        if act == "resume":
            engine.pause("keep", WITHIN_S)
        with place.held_at(moment, 2) as held:
            said = held.meanwhile(acts[act])
            held.go()
            assert "error" not in place.trainer.end(held.call)
        engine.resume()
        clients.went_on()
    if act == "undo":
        assert isinstance(said, lw.errors.RoundOpen)
    if act == "abort":
        assert any(answer.finish == "abort" for _, answer in clients.answers)
    judge(place).serves(2)
    judge(place).no_mixture(clients)
    assert "error" not in place.trainer.ask("publish", label=3)
    judge(place).serves(3)


def refused(call: Callable[[], object]) -> LiveWeightError:
    """What it raises."""
    with pytest.raises(LiveWeightError) as caught:
        call()
    return caught.value
