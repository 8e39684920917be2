"""The parts of vLLM's integration that need no process: which versions are known, how ranks divide a version, and the middleware."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from liveweight.errors import Unavailable
from liveweight.integrations.vllm.middleware import CACHES, NAMING, App, Versions, naming_query, version_in
from liveweight.integrations.vllm.workers.compat import check_version
from liveweight.integrations.vllm.workers.target import divide, in_layers
from liveweight.plan.digest_sums import DigestSums
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec, Version


@pytest.mark.parametrize("version", ["0.28.0", "0.30.1", "0.32.0+cpu", "0.32.1rc1"])
def test_versions_with_the_known_contract_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "1.0", "dev", ""])
def test_other_versions_are_refused_with_those_that_are_known(version: str) -> None:
    with pytest.raises(Unavailable, match=r"which knows 0\.28 to 0\.32"):
        check_version(version)


def manifest(*shapes: tuple[str, tuple[int, ...]]) -> Manifest:
    return Manifest(tensors=tuple(TensorSpec(name=n, dtype=DType.BFLOAT16, shape=s) for n, s in shapes))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_of_a_host_divide_a_version_and_together_have_all_of_it(ranks: int) -> None:
    whole = manifest(("a", (100, 3)), ("b", (7,)), ("c", ()), ("d", (0, 4)), ("e", (50, 6)))
    shares = divide(whole, ranks)
    assert (
        DigestSums([share.layout for share in shares.ranks]).expected.names_digest() == whole.names_digest()
    )
    spans = sorted((s.first_byte, s.last_byte) for s in shares.ranks if s.layout.placed_bytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= shares.size_bytes


def test_tensors_are_installed_layer_by_layer_in_the_order_of_their_numbers() -> None:
    names = [
        "lm_head",
        "model.layers.10.q",
        "model.layers.2.mlp.experts.7.up",
        "model.layers.2.q",
        "model.norm",
    ]
    ordered = [spec.name for spec in in_layers(manifest(*((name, (1,)) for name in names)))]
    assert ordered == [
        "lm_head",
        "model.norm",
        "model.layers.2.mlp.experts.7.up",
        "model.layers.2.q",
        "model.layers.10.q",
    ]


class Engine:
    """Reports what it serves; another version at every call."""

    def __init__(self, *versions: str, processes: int = 1) -> None:
        self._versions = iter(versions)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=processes))

    async def get_weight_version(self) -> str:
        """The next one."""
        return next(self._versions)


def answered(app: App, engine: Engine, path: str = "/v1/completions") -> list[dict[str, Any]]:
    """What is sent for one request."""
    return asked(Versions(app), engine, path)


def asked(
    middleware: Versions,
    engine: Engine,
    path: str,
    *bodies: bytes,
    method: str = "POST",
    query: str = "",
) -> list[dict[str, Any]]:
    """What that sends for one request, whose body comes in these pieces."""
    sent: list[dict[str, Any]] = []
    pieces = list(bodies or (b"{}",))

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        body = pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(pieces)}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(b"content-length", b"2"), (b"content-type", b"application/json")],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
    }
    asyncio.run(middleware(scope, receive, send))
    return sent


def replies(kind: bytes, *bodies: bytes) -> App:
    """An application that answers this."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_an_answer_in_one_piece_has_both_versions_in_its_headers() -> None:
    start, *_ = answered(replies(b"application/json", b"{}"), Engine("step_1", "step_2"))
    headers = dict(start["headers"])
    assert (headers[b"x-weight-version"], headers[b"x-weight-version-finished"]) == (b"step_1", b"step_2")


def test_a_stream_ends_with_a_comment_that_has_both() -> None:
    start, first, comment, last = answered(replies(b"text/event-stream", b"data: {}\n\n"), Engine("a", "b"))
    assert dict(start["headers"])[b"x-weight-version"] == b"a"
    assert first["body"] == b"data: {}\n\n"
    text = comment["body"].decode()
    assert text.startswith(": weight-version ") and text.endswith("\n\n")
    assert json.loads(text.removeprefix(": weight-version ")) == {"admitted": "a", "finished": "b"}
    assert (last["body"], last.get("more_body", False)) == (b"", False)


def test_other_routes_are_left_alone() -> None:
    start, *_ = answered(replies(b"application/json"), Engine(), path="/health")
    assert start["headers"] == [(b"content-type", b"application/json")]


class Salts:
    """An application that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read a whole request, and what comes after it."""
        message = await receive()
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        assert not message["more_body"]
        assert (await receive())["type"] == "http.disconnect"
        self.asked.append(json.loads(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def salts(self) -> list[str]:
        """Of all requests so far."""
        return [request["cache_salt"] for request in self.asked]


async def silent(_scope: Any, _receive: Any, send: Any) -> None:
    """An application that answers nothing but that it is done."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def caches(middleware: Versions, engine: Engine) -> dict[str, Any]:
    """The middleware's answer about its caches."""
    _, body = asked(middleware, engine, CACHES, method="GET")
    answer: dict[str, Any] = json.loads(body["body"])
    return answer


def test_requests_of_one_version_share_a_salt_and_those_after_an_install_have_another() -> None:
    app, engine = Salts(), Engine(*"abcdefghij")
    middleware = Versions(app)
    asked(middleware, engine, "/v1/completions", b'{"prompt"', b': "x"}')
    asked(middleware, engine, "/v1/chat/completions", b'{"messages": []}')
    middleware._app = silent
    asked(middleware, engine, "/update_weights")
    middleware._app = app
    asked(middleware, engine, "/v1/completions", b'{"prompt": "x"}')
    asked(middleware, engine, "/v1/completions", b'{"prompt": "x", "cache_salt": "mine"}')
    first, second, third, fourth = app.salts()
    assert first == second != third
    assert fourth == f"{third}.mine"
    assert app.asked[0]["prompt"] == "x"
    assert caches(middleware, engine) == {"kept_apart": True, "why": None}


def test_an_install_that_failed_counts_too() -> None:
    async def failing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("half of it is there")

    app, engine = Salts(), Engine(*"abcd")
    middleware = Versions(app)
    asked(middleware, engine, "/v1/completions")
    middleware._app = failing
    with pytest.raises(RuntimeError):
        asked(middleware, engine, "/update_weights")
    middleware._app = app
    asked(middleware, engine, "/v1/completions")
    assert len(set(app.salts())) == 2


def test_what_came_without_a_salt_is_said_and_so_are_several_processes() -> None:
    middleware = Versions(silent)
    for harmless in ("/pause", "/tokenize", "/update_weight_version"):
        asked(middleware, Engine(), harmless)
    asked(middleware, Engine(), "/v1/models", method="GET")
    assert caches(middleware, Engine())["kept_apart"]
    assert caches(middleware, Engine(processes=2)) == {"kept_apart": False, "why": "2 processes serve"}
    asked(middleware, Engine(), "/v1/embeddings")
    assert caches(middleware, Engine()) == {"kept_apart": False, "why": "a request came by /v1/embeddings"}


def test_what_is_no_request_is_left_for_vllm_to_refuse() -> None:
    seen: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await silent(_scope, receive, send)

    for body in (b"no json", b"[1, 2]", b'"text"', b"\xff\xfe"):
        asked(Versions(app), Engine("a", "b"), "/v1/completions", body)
    assert seen == [b"no json", b"[1, 2]", b'"text"', b"\xff\xfe"]


# Versions that a request demands.

STEP_9 = Version(run="r", label="step_9", digest="9" * 32, number=3)


def demanding(middleware: Versions, demand: Any, *, serving: str = "step_9") -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a request with that demand, which comes in two pieces."""
    body = json.dumps({"prompt": "x", "weight_version": demand}).encode()
    start, *pieces = asked(middleware, Engine(serving, serving), "/v1/completions", body[:9], body[9:])
    text = b"".join(piece["body"] for piece in pieces)
    if start["status"] == 409:
        assert dict(start["headers"])[b"retry-after"] == b"1"
    return start["status"], json.loads(text) if text else {}


def named(app: App, version: Version = STEP_9) -> Versions:
    """A middleware that a trainer told that version."""
    middleware = Versions(silent)
    asked(middleware, Engine(), NAMING, b'{"new_version": "x"}', query=naming_query(version))
    middleware._app = app
    return middleware


@pytest.mark.parametrize(
    "demand", [{"min": 3}, {"exact": "step_9"}, {"min": 1, "exact": "step_9", "run": "r"}, None]
)
def test_a_demand_that_is_met_is_taken_out_before_vllm_sees_the_request(demand: Any) -> None:
    app = Salts()
    assert demanding(named(app), demand) == (200, {})
    assert set(app.asked[0]) == {"prompt", "cache_salt"}


@pytest.mark.parametrize("demand", [{"min": 4}, {"exact": "step_8"}, {"min": 1, "run": "s"}])
def test_one_that_is_not_met_is_refused_as_by_the_engine_and_vllm_sees_nothing(demand: Any) -> None:
    app = Salts()
    status, body = demanding(named(app), demand)
    assert (status, app.asked) == (409, [])
    error = body["error"]
    assert (error["code"], error["param"], error["demanded"]) == ("LW-114", "weight_version", demand)
    assert error["serving"] == {"run": "r", "label": "step_9", "digest": "9" * 32, "number": 3}


@pytest.mark.parametrize("demand", [{}, 5, {"run": "r"}, {"min": "3"}, {"min": 1, "max": 2}])
def test_what_is_no_demand_is_a_wrong_request(demand: Any) -> None:
    app = Salts()
    status, body = demanding(named(app), demand)
    assert (status, body["error"]["param"], app.asked) == (400, "weight_version", [])


def test_of_a_version_that_nobody_named_only_the_label_is_known() -> None:
    for middleware in (Versions(silent), named(silent)):
        assert demanding(middleware, {"exact": "default"}, serving="default")[0] == 200
        status, body = demanding(middleware, {"min": 0}, serving="default")
        assert (status, body["error"]["serving"]["label"]) == (409, "default")
        assert body["error"]["serving"]["number"] is None


def test_demands_on_other_routes_are_left_to_vllm() -> None:
    seen: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await silent(_scope, receive, send)

    body = b'{"input": "x", "weight_version": {"min": 9}}'
    asked(Versions(app), Engine(), "/v1/embeddings", body)
    assert seen == [body]


@pytest.mark.parametrize(
    "version", [STEP_9, Version(run="r s", label="übung & 5"), Version(run="r", label=7)]
)
def test_a_version_is_named_to_the_middleware_in_a_query_that_vllm_ignores(version: Version) -> None:
    read = version_in(naming_query(version).encode())
    assert read == version
    assert read is not None and read.number == version.number
    assert version_in(b"") is None
    assert version_in(b"a=b") is None
