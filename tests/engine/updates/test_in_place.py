"""Engines without room for a shadow: updates in place while clients ask; and torn, on every endpoint, until another round has come."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import liveweight as lw
from liveweight.cli.main import app
from liveweight.engine.engine import Engine
from liveweight.engine.updates.requested_update import RequestedVersion
from liveweight.engine.updates.verifying import VerificationRequest
from liveweight.errors import RoundFailed, Torn, WrongState
from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent, OfferMade
from liveweight.wire.messages.values import KvPolicy
from tests.support.engine.elastic import recovered, saved
from tests.support.engine.engines import WITHIN_S, Answer, Logits, Models, answers, ask, greedy
from tests.support.engine.versions import Clients, mixtures
from tests.support.processes.http_server import serving

IN_PLACE = {"shadow": "none", "chunk_bytes": 16384, "draft_chunk_bytes": 2048}
PROMPTS = [list(range(5, 45)), [9, 10, 11]]
Start = Callable[..., Engine]


class Damaging:
    """A publisher whose next offer has a bit flipped, after it was digested."""

    def __init__(self, make: Any, engine: Any, source: Path, **settings: Any) -> None:
        bus, self.armed = Bus(), False
        bus.subscribe(self._on_event)
        self.publisher: lw.Publisher = make(engine, source, bus=bus, **settings)

    def _on_event(self, event: AnyEvent) -> None:
        if isinstance(event, OfferMade) and self.armed:
            self.armed = False
            arena: Any = self.publisher._offers
            ctypes.c_ubyte.from_address(arena._arena.memory.address).value ^= 1

    def tear(self, label: int) -> RoundFailed:
        """Publish what is damaged."""
        self.armed = True
        with pytest.raises(RoundFailed) as failed:
            self.publisher.publish(label)
        return failed.value


@pytest.mark.parametrize("policy", ["recompute", "reuse"])
def test_requests_wait_while_their_weights_are_overwritten_and_go_on_under_the_new_ones(
    start: Start,
    publisher: Any,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    policy: KvPolicy,
) -> None:
    directories = [models.directory(mtp=True, seed=seed) for seed in range(3)]
    engine = start(directories[0], tp=2, kv_policy=policy, updates=IN_PLACE)
    with Clients(engine, 3, 40) as asked:
        for label in (1, 2):
            with publisher(engine, directories[label]) as sender:
                assert sender.publish(label).verified
            asked.went_on()
            verdict = engine.verify(VerificationRequest()).verdict
            assert (verdict.match, str(verdict.serving)) == (True, str(label))
    seen = {token.weights.partition("@")[0] for _, answer in asked.answers for token in answer.tokens}
    assert seen == {"initial", "1", "2"}
    if policy != "reuse":  # there, keys and values of the version before are used, and said to be
        order = {"initial": 0, "1": 1, "2": 2}
        logits = lambda name: transformers_logits(directories[order[name.partition("@")[0]]])  # noqa: E731
        assert mixtures(asked.answers, logits) == []
    with pytest.raises(WrongState, match="in place of the version before"):
        engine.undo(WITHIN_S)


def test_a_torn_engine_ends_its_requests_refuses_others_and_says_so_everywhere_until_it_is_healed(
    start: Start, publisher: Any, models: Models, transformers_logits: Callable[[Path], Logits]
) -> None:
    old, new = models.directory(), models.directory(seed=1)
    engine = start(old, tp=2, updates=IN_PLACE)
    damaging = Damaging(publisher, engine, new)
    known = [answer.ids for answer in answers(engine, PROMPTS, greedy(8))]
    running = ask(engine, [7, 8, 9], greedy(400))
    running.piece()
    error = damaging.tear(1)
    assert (error.code, error.serving) == ("LW-601", None)
    assert running.wait().finish == "abort"
    assert 0 < len(running.tokens) < 400
    assert mixtures([([7, 8, 9], running)], lambda _: transformers_logits(old)) == []
    assert_torn(engine)
    with serving(engine) as served, served.http() as client:
        assert_says_torn(client, engine)
        line = CliRunner().invoke(app, ["status", served.url])
        assert "torn by 1" in line.output
        assert damaging.publisher.publish(2).verified
        healed = answers(engine, PROMPTS, greedy(8))
        assert [answer.finish for answer in healed] == ["length", "length"]
        assert client.get("/health").json()["status"] == "ok"
        assert mixtures(list(zip(PROMPTS, healed, strict=True)), lambda _: transformers_logits(new)) == []
    assert known != [answer.ids for answer in healed]


def assert_torn(engine: Engine) -> None:
    status = engine.status()
    assert (status.state, status.running, status.waiting) == ("torn", 0, 0)
    assert status.blocks_free == status.blocks_total
    assert engine.update_status().state.startswith("torn by 1 (")
    with pytest.raises(Torn, match="holds a mixture since 1 failed"):
        ask(engine, [1, 2, 3], greedy(4))
    with pytest.raises(Torn):
        engine.verify(VerificationRequest())
    with pytest.raises(WrongState, match="torn by 1"):
        engine.undo(WITHIN_S)


def assert_says_torn(client: httpx.Client, engine: Engine) -> None:
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "torn")
    assert health.json()["error"]["code"] == "LW-601"
    weights = client.get("/v1/weights").json()
    assert (weights["version"], weights["state"][:9]) == (None, "torn by 1")
    assert (weights["rounds"][-1]["outcome"], "mixture" in weights["rounds"][-1]["reason"]) == ("torn", True)
    wish = {"model": engine.name, "prompt": [1, 2, 3], "max_tokens": 4}
    for refused in (
        client.post("/v1/completions", json=wish),
        client.post("/v1/weights/verify", json={}),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "LW-601")
    assert "liveweight_engine_up 0.0" in client.get("/metrics").text


def test_pages_of_before_are_not_found_again_after_it_was_torn(
    start: Start, publisher: Any, models: Models
) -> None:
    """Also not under the very version that had filled them."""
    engine = start(models.directory(), updates=IN_PLACE)
    damaging = Damaging(publisher, engine, models.directory(seed=1))
    before = answers(engine, PROMPTS[:1], greedy(8))[0].ids
    assert answers(engine, PROMPTS[:1], greedy(8))[0].ids == before
    cached = engine.status().counts.cached_tokens
    assert cached > 0
    damaging.tear(1)
    publisher(engine, models.directory()).publish(0)
    assert answers(engine, PROMPTS[:1], greedy(8))[0].ids == before
    assert engine.status().counts.cached_tokens == cached


def test_an_operator_heals_a_torn_engine_from_its_source(
    start: Start, publisher: Any, models: Models, short_path: Path
) -> None:
    new = models.directory(seed=1)
    address = f"ipc://{short_path}/source.sock"
    with lw.Publisher(
        new, address=address, secret=short_path / "secret", directory=short_path / "source"
    ) as source:
        source.offer("good")
        engine = start(models.directory(), tp=2, updates=IN_PLACE | {"source": address})
        Damaging(publisher, engine, new).tear(1)
        updated = engine.update_weights(RequestedVersion(call="c", pause="keep"))
        assert (updated.outcome, str(updated.version)) == ("committed", "good")
        assert answers(engine, PROMPTS, greedy(4))[0].finish == "length"
        assert engine.status().state == "running"
        assert engine.verify(VerificationRequest()).verdict.match


def test_an_engine_that_restarts_its_ranks_comes_back_from_its_snapshot_when_it_is_torn(
    elastic: Any, publisher: Any, models: Models
) -> None:
    engine = elastic(models.directory(), updates=IN_PLACE)
    version = publisher(engine, models.directory(seed=1)).publish(1).version
    saved(engine, version)
    expected = [answer.ids for answer in answers(engine, PROMPTS, greedy(8))]
    running = ask(engine, [7, 8, 9], greedy(400))
    running.piece()
    assert Damaging(publisher, engine, models.directory(seed=2)).tear(2).code == "LW-601"
    assert running.wait().finish == "abort"
    recovered(engine, 1)
    assert engine.update_status().serving == version
    assert engine.verify(VerificationRequest()).verdict.match
    assert [answer.ids for answer in answers(engine, PROMPTS, greedy(8))] == expected


def test_a_draft_that_was_torn_is_not_kept(start: Start, publisher: Any, models: Models) -> None:
    """A round that leaves the draft out does not heal an engine whose draft may be a mixture; after one that has it, it may."""
    with_draft, bare = models.directory(mtp=True, seed=1), models.directory(seed=2)
    engine = start(models.directory(mtp=True), tp=2, updates=IN_PLACE | {"draft_weights": "keep"})
    Damaging(publisher, engine, with_draft).tear(1)
    with pytest.raises(RoundFailed, match="only an offer that has its draft, too, heals it"):
        publisher(engine, bare).publish(2)
    assert engine.status().state == "torn"
    publisher(engine, with_draft).publish(3)
    damaged = Damaging(publisher, engine, bare)
    damaged.tear(4)  # the draft was not part of it
    damaged.publisher.publish(5)
    assert engine.verify(VerificationRequest()).verdict.match
    assert isinstance(ask(engine, [1, 2], greedy(2)).wait(), Answer)
