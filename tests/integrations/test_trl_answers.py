"""Rollouts over HTTP: what is asked, which answers are refused, and who is asked again. Servers here answer as they are told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import liveweight as lw
from liveweight.errors import DeadlineExceeded, KeyRefused, MessageInvalid, RequestInvalid, TrainerRefused
from liveweight.integrations.connect import Engine
from liveweight.integrations.trl.completions import (
    CompletionEndpoint,
    EngineProblem,
    GroupAnswer,
    SamplingFields,
    ServedModel,
)
from liveweight.integrations.trl.rollouts import PromptGroup, RolloutBatch, groups_of
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version

VERSION = Version(run="run", label="step_3", digest="a" * 32)
SAMPLING = SamplingFields(
    max_tokens=8, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, more={"seed": 1}
)
PLAIN = SamplingFields(
    max_tokens=8, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, more={}
)
OURS = {"label": "step_3", "digest": "a" * 32}
HEADERS = {"x-weight-version": "step_3", "x-weight-version-finished": "step_3"}

Reply = tuple[int, dict[str, str], Any]


def choice(**changes: Any) -> dict[str, Any]:
    """One answer of an engine of ours."""
    plain = {
        "index": 0,
        "text": "",
        "finish_reason": "length",
        "token_ids": [4, 5],
        "logprobs": {"token_logprobs": [-0.5, -1.5]},
        "weight_version": OURS,
    }
    return {**plain, **changes}


def answer(*choices: dict[str, Any], **headers: str) -> Reply:
    """A 200 with these choices."""
    return 200, headers, {"choices": list(choices)}


def error(status: int, message: str, param: str | None = None, **headers: str) -> Reply:
    """An error, as engines write it."""
    return status, headers, {"error": {"message": message, "param": param}}


@dataclass
class Script:
    """A server that answers each completion by the next reply, and the last one from then on; other routes by path."""

    replies: list[Reply | Callable[[dict[str, Any]], Reply]]
    routes: dict[str, Reply] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def reply(self, path: str, body: dict[str, Any] | None) -> Reply:
        if body is None:
            return self.routes.get(path, error(404, "no such route"))
        self.asked.append(body)
        found = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return found(body) if callable(found) else found


@pytest.fixture
def serve() -> Iterator[Callable[..., Script]]:
    """Starts servers; all are closed after the test."""
    with ExitStack() as stack:

        def start(*replies: Any, **routes: Reply) -> Script:
            script = Script(
                list(replies), {f"/{name.replace('__', '/')}": one for name, one in routes.items()}
            )

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self._send(*script.reply(self.path.partition("?")[0], None))

                def do_POST(self) -> None:
                    size = int(self.headers["Content-Length"])
                    self._send(*script.reply(self.path, json.loads(self.rfile.read(size))))

                def _send(self, status: int, headers: dict[str, str], body: Any) -> None:
                    raw = json.dumps(body).encode()
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(raw)

                def log_message(self, *_: object) -> None:
                    pass

            class Server(ThreadingHTTPServer):
                request_queue_size = 256  # a batch connects all at once

            server = Server(("127.0.0.1", 0), Handler)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            script.url = f"http://127.0.0.1:{server.server_port}"
            return script

        yield start


def complete(engine: Engine, count: int = 1, sampling: SamplingFields = SAMPLING) -> Any:
    endpoint = CompletionEndpoint.of(engine, None)
    return endpoint.complete([1, 2], count, sampling, VERSION, Deadline.after(10))


def test_our_engines_are_asked_for_tokens_and_processed_logprobs(serve: Callable[..., Script]) -> None:
    script = serve(answer(choice(index=1, token_ids=[9], logprobs={"token_logprobs": [-3]}), choice()))
    assert complete(script.url, 2) == GroupAnswer(completions=[[4, 5], [9]], logprobs=[[-0.5, -1.5], [-3.0]])
    assert script.asked == [
        {
            "prompt": [1, 2],
            "n": 2,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "seed": 1,
            "logprobs": 0,
            "logprobs_mode": "processed_logprobs",
            "return_token_ids": True,
            "weight_version": {"exact": "step_3", "run": "run"},
        }
    ]


def test_vllm_is_asked_by_its_models_name_and_believed_by_its_headers(serve: Callable[..., Script]) -> None:
    said = choice(weight_version=None)
    models: Reply = (200, {}, {"data": [{"id": "m", "max_model_len": 256}]})
    info: Reply = (200, {}, {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}})
    script = serve(answer(said, **HEADERS), v1__models=models, server_info=info)
    endpoint = CompletionEndpoint.of(lw.vllm(script.url), None)
    assert endpoint.describe() == ServedModel(name="m", context=256, logprobs_mode="raw_logprobs")
    found = endpoint.complete([1, 2], 1, PLAIN, VERSION, Deadline.after(10))
    assert found == GroupAnswer(completions=[[4, 5]], logprobs=[[-0.5, -1.5]])
    assert script.asked[0]["model"] == "m"
    assert "logprobs_mode" not in script.asked[0]


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "another label": ({"weight_version": {**OURS, "label": "initial"}}, "initial"),
    "another content under the label": ({"weight_version": {**OURS, "digest": "b" * 32}}, "step_3"),
    "another run": ({"weight_version": {**OURS, "run": "other"}}, "step_3"),
    "no version": ({"weight_version": None}, "no version"),
    "a commit within the answer": (
        {
            "weight_spans": [
                {"from": 0, "weight_version": {**OURS, "label": "step_2"}},
                {"from": 1, "weight_version": OURS},
            ]
        },
        "step_2",
    ),
    "keys and values of another version": (
        {"kv": "reused"},
        "step_3 over keys and values of another version",
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_an_answer_of_another_version_is_refused(serve: Callable[..., Script], case: str) -> None:
    changes, named = OTHER[case]
    found = complete(serve(answer(choice(), choice(index=1, **changes))).url, 2)
    assert isinstance(found, EngineProblem)
    assert found.kind == "other_version"
    assert f"answered with {named}" in found.reason


@pytest.mark.parametrize("header", list(HEADERS))
def test_an_answer_of_vllm_that_another_version_had_a_part_in_is_refused(
    serve: Callable[..., Script], header: str
) -> None:
    script = serve(answer(choice(weight_version=None), **{**HEADERS, header: "step_2"}))
    found = complete(lw.vllm(script.url))
    assert isinstance(found, EngineProblem)
    assert found.kind == "other_version"


def test_a_vllm_that_does_not_say_its_version_is_refused(serve: Callable[..., Script]) -> None:
    with pytest.raises(
        TrainerRefused, match=r"--middleware liveweight\.integrations\.vllm\.middleware\.Versions"
    ):
        complete(lw.vllm(serve(answer(choice())).url))


PROBLEMS: dict[str, tuple[Reply, str]] = {
    "it serves another version": (error(409, "serves step_2", **{"Retry-After": "2"}), "other_version"),
    "its queue is full": (error(429, "full", **{"Retry-After": "2"}), "busy"),
    "its ranks are being started": (error(503, "pending", **{"Retry-After": "2"}), "lost"),
    "it broke off an answer": (answer(choice(finish_reason="abort")), "lost"),
    "it was killed while it answered": ((200, {"Content-Length": "9999"}, {}), "lost"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_of_an_engine_are_told_apart(serve: Callable[..., Script], case: str) -> None:
    reply, kind = PROBLEMS[case]
    found = complete(serve(reply).url)
    assert isinstance(found, EngineProblem)
    assert found.kind == kind
    if "Retry-After" in reply[1]:
        assert found.retry_s == 2.0


def test_an_engine_that_is_gone_is_lost() -> None:
    found = complete("http://127.0.0.1:1")
    assert isinstance(found, EngineProblem)
    assert (found.kind, "http://127.0.0.1:1 cannot be reached" in found.reason) == ("lost", True)


FATAL: dict[str, tuple[Reply, type[Exception]]] = {
    "a request that no engine takes": (error(400, "longer than the context"), RequestInvalid),
    "another key": (error(401, "no"), KeyRefused),
    "too few answers": (answer(), MessageInvalid),
    "logprobs that do not fit": (answer(choice(logprobs={"token_logprobs": [-1]})), MessageInvalid),
    "no JSON of ours": ((200, {}, {"choices": 1}), MessageInvalid),
}


@pytest.mark.parametrize("case", FATAL)
def test_what_asking_again_would_not_mend_is_raised(serve: Callable[..., Script], case: str) -> None:
    reply, kind = FATAL[case]
    with pytest.raises(kind):
        complete(serve(reply).url)


@pytest.mark.parametrize("dialect", ["liveweight", "vllm"])
def test_every_request_demands_its_version(serve: Callable[..., Script], dialect: str) -> None:
    script = serve(answer(choice(), **HEADERS))
    engine: Engine = script.url if dialect == "liveweight" else lw.vllm(script.url)
    endpoint = CompletionEndpoint.of(engine, None)
    endpoint.complete([1], 1, SAMPLING, VERSION, Deadline.after(10))
    run = {"run": "run"} if dialect == "liveweight" else {}  # vLLM knows labels only
    assert script.asked[0]["weight_version"] == {"exact": "step_3", **run}


def test_settings_are_tried_out_whatever_version_serves(serve: Callable[..., Script]) -> None:
    script = serve(answer(choice(weight_version={"label": "initial"})))
    assert CompletionEndpoint.of(script.url, None).try_out(SAMPLING, 4, 1) is None
    assert "weight_version" not in script.asked[0]
    assert (script.asked[0]["n"], script.asked[0]["max_tokens"]) == (4, 1)


def test_settings_that_an_engine_refuses_are_refused_beforehand(serve: Callable[..., Script]) -> None:
    script = serve(error(400, "n: too many", "n"))
    with pytest.raises(RequestInvalid, match="n: too many"):
        CompletionEndpoint.of(script.url, None).try_out(SAMPLING, 4, 1)


def batch(
    scripts: Sequence[Script], groups: Sequence[PromptGroup], *, recover: Any = None, serving: Any = None
) -> RolloutBatch:
    return RolloutBatch(
        endpoints=[CompletionEndpoint.of(one.url, None) for one in scripts],
        groups=groups,
        sampling=PLAIN,
        version=VERSION,
        serving=set(range(len(scripts))) if serving is None else serving,
        recover=recover or (lambda: set(range(len(scripts)))),
        recover_s=5.0,
        answer_s=10.0,
    )


def echo(body: dict[str, Any]) -> Reply:
    """Answers with the prompt."""
    token = body["prompt"][0]
    given = [
        choice(index=index, token_ids=[token], logprobs={"token_logprobs": [-1.0]})
        for index in range(body["n"])
    ]
    return answer(*given)


GROUPS = [PromptGroup(prompt=[number], count=2) for number in range(40)]
ECHOED = [[[number], [number]] for number in range(40)]


def test_answers_come_in_the_order_of_the_prompts_from_whichever_engine(serve: Callable[..., Script]) -> None:
    scripts = [serve(echo), serve(echo)]
    found = batch(scripts, GROUPS).run()
    assert [one.completions for one in found] == ECHOED
    assert sum(len(one.asked) for one in scripts) == 40
    assert all(one.asked for one in scripts)


def test_prompts_that_were_refused_are_asked_again_once_the_engine_is_back(
    serve: Callable[..., Script],
) -> None:
    script = serve(*[answer(choice(weight_version={"label": "initial"}), choice(index=1))] * 3, echo)
    recovered: list[int] = []

    def recover() -> set[int]:
        recovered.append(1)
        return {0}

    work = batch([script], GROUPS, recover=recover)
    assert [one.completions for one in work.run()] == ECHOED
    assert work.counts.refused == 3
    assert recovered


def test_the_others_answer_for_an_engine_that_stays_away(serve: Callable[..., Script]) -> None:
    script = serve(echo)
    gone = Script([echo], url="http://127.0.0.1:1")
    found = batch([gone, script], GROUPS, recover=lambda: {1}).run()
    assert [one.completions for one in found] == ECHOED


def test_an_engine_that_is_behind_is_not_asked(serve: Callable[..., Script]) -> None:
    behind, script = serve(echo), serve(echo)
    batch([behind, script], GROUPS, serving={1}).run()
    assert behind.asked == []


def test_a_full_engine_is_asked_again(serve: Callable[..., Script]) -> None:
    script = serve(error(429, "full", **{"Retry-After": "0.05"}), echo)
    assert [one.completions for one in batch([script], GROUPS[:3]).run()] == ECHOED[:3]


def test_the_wait_for_engines_ends_with_what_was_waited_for(serve: Callable[..., Script]) -> None:
    work = batch([serve(error(503, "pending"))], GROUPS[:2], recover=lambda: set())
    work.recover_s = 0.3
    with pytest.raises(DeadlineExceeded, match=r"an engine to serve step_3: .*pending"):
        work.run()


def test_an_engine_that_seems_to_be_back_and_never_is_does_not_hold_the_batch(
    serve: Callable[..., Script],
) -> None:
    stale = answer(choice(weight_version={"label": "initial"}), choice(index=1))
    work = batch([serve(stale)], GROUPS[:2])
    work.recover_s = 0.3
    with pytest.raises(DeadlineExceeded, match="answered with initial instead of step_3"):
        work.run()


def test_a_request_that_no_engine_takes_ends_the_batch(serve: Callable[..., Script]) -> None:
    with pytest.raises(RequestInvalid, match="too long"):
        batch([serve(error(400, "too long"))], GROUPS).run()


def test_an_error_while_engines_are_recovered_ends_the_batch(serve: Callable[..., Script]) -> None:
    def recover() -> set[int]:
        raise KeyRefused("no")

    with pytest.raises(KeyRefused):
        batch([serve(error(503, "pending"))], GROUPS, recover=recover).run()


def test_equal_prompts_are_one_group_up_to_its_size() -> None:
    assert groups_of([[1], [1], [1], [1], [2], [2]], 2) == [
        PromptGroup(prompt=[1], count=2),
        PromptGroup(prompt=[1], count=2),
        PromptGroup(prompt=[2], count=2),
    ]
    assert [one.count for one in groups_of([[1], [1], [2], [3]], 1)] == [1, 1, 1, 1]
    assert groups_of([], 4) == []
