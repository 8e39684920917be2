"""The parts of vLLM's integration that need no process: which versions are known, how ranks divide a version, and the middleware."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from liveweight.errors import Unavailable
from liveweight.integrations.vllm.middleware import CACHES, App, Versions
from liveweight.integrations.vllm.workers.compat import check_version
from liveweight.integrations.vllm.workers.target import divide, in_layers
from liveweight.plan.digest_sums import DigestSums
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec


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
    middleware: Versions, engine: Engine, path: str, *bodies: bytes, method: str = "POST"
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
