"""Rollouts: which version drew which token, how far generation may run ahead, and what is dropped."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from liveweight.errors import MessageInvalid
from liveweight.lab.demo.learning.on_policy_check import to_check
from liveweight.lab.demo.learning.rollouts import Rollouts, RolloutSettings
from liveweight.lab.demo.learning.samples import NONE_OF_OURS, read, request
from liveweight.lab.demo.learning.staleness import StalenessBound
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.lab.demo.stopping import RunStopped, Stop

TASK = SortDigits(digits=2)
BATCH = 4


def choice(index: int, label: str, **changes: Any) -> dict[str, Any]:
    """A choice as the engine answers it: `1 2 END`."""
    return {
        "index": index,
        "text": "12",
        "finish_reason": "stop",
        "token_ids": [1, 2, 9],
        "prompt_token_ids": [2, 1, 7],
        "logprobs": {"token_logprobs": [-0.1, -0.2, -0.3], "tokens": [], "top_logprobs": []},
        "weight_version": {"label": label, "digest": "d"},
        **changes,
    }


def answer(*choices: dict[str, Any]) -> bytes:
    return json.dumps({"id": "x", "choices": list(choices)}).encode()


def test_every_token_has_the_version_of_its_span() -> None:
    spans = [
        {"from": 0, "weight_version": {"label": "3", "digest": "a"}},
        {"from": 2, "weight_version": {"label": "4", "digest": "b"}},
    ]
    crossing = choice(0, "4", weight_spans=spans, kv="reused")
    (group,) = read(answer(choice(1, "4", text="21"), crossing), ["21="], TASK, group=2)
    assert [one.versions for one in group.samples] == [(3, 3, 4), (4, 4, 4)]
    assert [one.crossed for one in group.samples] == [True, False]
    assert [one.reused for one in group.samples] == [True, False]
    assert [one.reward for one in group.samples] == [1.0, 0.0]
    assert group.oldest == 3


def test_where_only_beginning_and_end_are_known_an_answer_in_between_counts_as_the_older() -> None:
    plain = {key: value for key, value in choice(0, "").items() if key != "weight_version"}
    (whole,) = read(answer(plain), ["21="], TASK, group=1, served=("3", "3"))
    (mixed,) = read(answer(plain), ["21="], TASK, group=1, served=("3", "4"))
    (before,) = read(answer(plain), ["21="], TASK, group=1, served=("default", "3"))
    assert [group.samples[0].versions for group in (whole, mixed)] == [(3, 3, 3), (3, 3, 3)]
    assert [group.samples[0].crossed for group in (whole, mixed)] == [False, True]
    assert to_check([whole, mixed], 2) == list(whole.samples)
    assert before.oldest == NONE_OF_OURS


def test_an_answer_that_did_not_end_is_wrong_and_one_that_was_cut_short_is_no_sample() -> None:
    endless = choice(0, "0", finish_reason="length")
    assert read(answer(endless), ["21="], TASK, group=1)[0].samples[0].reward == 0.0
    cut = choice(1, "0", finish_reason="abort", token_ids=[1], logprobs={"token_logprobs": [-0.1]})
    assert [one.question for one in read(answer(choice(0, "0"), cut), ["21=", "12="], TASK, group=1)] == [
        "21="
    ]


def test_weights_of_nobody_are_older_than_any_bound_allows() -> None:
    (group,) = read(answer(choice(0, "initial")), ["21="], TASK, group=1)
    assert group.oldest == NONE_OF_OURS
    assert not StalenessBound(staleness=16, batch=1).fresh(group.oldest, 0)


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"choices": [{}]}', answer()])
def test_what_is_no_answer_is_refused(raw: bytes) -> None:
    with pytest.raises(MessageInvalid):
        read(raw, ["21="], TASK, group=1)


def test_a_request_asks_for_what_a_sample_needs() -> None:
    body = request(["21="], TASK, group=8)
    assert (body["n"], body["max_tokens"], body["return_token_ids"], body["logprobs"]) == (8, 3, True, 0)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_generation_runs_ahead_by_the_bound_and_no_further(staleness: int) -> None:
    bound = StalenessBound(staleness=staleness, batch=BATCH)
    for served in range(3):
        allowed = [asked for asked in range(100) if bound.may_request(asked, served, served + 1)]
        assert allowed == list(range((served + staleness + 1) * BATCH))
        waiting = [asked for asked in range(100) if bound.may_request(asked, served, served)]
        assert waiting == list(range((served + (staleness if staleness >= 2 else staleness + 1)) * BATCH))
    assert bound.fresh(7 - staleness, 7)
    assert not bound.fresh(6 - staleness, 7)
    assert StalenessBound(staleness=staleness, batch=BATCH, enforced=False).fresh(0, 1000)


class FakeEngine:
    """Answers every request with the label that the test set, and counts requests. Has no weights."""

    def __init__(self) -> None:
        self.label, self.asked, self.status = "0", 0, 200
        self.changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                count = len(body["prompt"]) * body["n"]
                with outer.changed:
                    raw = answer(*(choice(index, outer.label) for index in range(count)))
                    outer.asked += len(body["prompt"])
                    outer.changed.notify_all()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                del format, args

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url: str | None = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def until_asked(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.asked >= count, 60)


def rollouts(engine: FakeEngine, stop: Stop, staleness: int) -> Rollouts:
    bound = StalenessBound(staleness=staleness, batch=BATCH)
    return Rollouts([engine], TASK, bound, RolloutSettings(threads=3, questions=2, group=2), stop)


def test_questions_wait_until_the_engines_serve_what_their_step_may_learn_from() -> None:
    with FakeEngine() as engine, Stop() as stop, rollouts(engine, stop, 1) as running:
        engine.until_asked(2 * BATCH)
        assert len(running.take(BATCH, 0).groups) == BATCH
        assert len(running.take(BATCH, 1).groups) == BATCH
        assert engine.asked == 2 * BATCH  # all of them were taken, and still nothing more is asked
        engine.label = "1"
        running.serves(1)
        engine.until_asked(3 * BATCH)
        taken = running.take(BATCH, 2)
        assert {group.oldest for group in taken.groups} == {1}
        assert (taken.dropped, engine.asked) == (0, 3 * BATCH)


def test_the_last_batch_of_the_bound_is_asked_for_when_the_next_weights_are_on_their_way() -> None:
    with FakeEngine() as engine, Stop() as stop, rollouts(engine, stop, 2) as running:
        engine.until_asked(2 * BATCH)
        assert len(running.take(BATCH, 0).groups) == BATCH
        assert len(running.take(BATCH, 1).groups) == BATCH
        assert engine.asked == 2 * BATCH
        running.offers(1)  # these cross its commit, if they are not done before
        engine.until_asked(3 * BATCH)
        assert len(running.take(BATCH, 2).groups) == BATCH
        assert engine.asked == 3 * BATCH
        engine.label = "1"
        running.serves(1)
        running.offers(2)
        assert {group.oldest for group in running.take(BATCH, 3).groups} == {1}
        assert engine.asked == 4 * BATCH


def test_what_is_too_old_is_dropped_and_asked_for_again() -> None:
    with FakeEngine() as engine, Stop() as stop, rollouts(engine, stop, 2) as running:
        running.offers(1)
        engine.until_asked(3 * BATCH)  # version 0, as many as may be
        with engine.changed:
            engine.label = "5"
        running.serves(5)
        taken = running.take(BATCH, 5)
        assert taken.dropped == 3 * BATCH
        assert {group.oldest for group in taken.groups} == {5}


def test_an_engine_that_comes_back_elsewhere_is_found() -> None:
    with FakeEngine() as first, FakeEngine() as second, Stop() as stop, rollouts(first, stop, 0) as running:
        running.take(BATCH, 0)
        first.url = None
        running.serves(1)
        second.label = "1"
        first.url = second.url
        assert {group.oldest for group in running.take(BATCH, 1).groups} <= {1}
        assert second.asked > 0


def test_a_trainer_that_waits_for_rollouts_hears_that_it_is_over() -> None:
    with FakeEngine() as engine, Stop() as stop:
        engine.url = None
        with rollouts(engine, stop, 0) as running:
            ending = threading.Thread(target=stop.stop)
            ending.start()
            with pytest.raises(RunStopped):
                running.take(BATCH, 0)
            ending.join()


def test_an_engine_that_refuses_requests_is_no_reason_to_ask_again() -> None:
    with FakeEngine() as engine, Stop() as stop:
        engine.status = 404
        with rollouts(engine, stop, 0) as running, pytest.raises(MessageInvalid, match="status 404"):
            running.take(BATCH, 0)
