"""The OpenAPI schema: requests made from it, and answers compared with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from liveweight.engine.config import EngineConfig, Updates
from liveweight.spec.manifest import Version
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served, serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
    unsupported_method,
]


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


CONTROL = [
    ("GET", "/v1/weights"),
    ("POST", "/v1/weights/undo"),
    ("POST", "/v1/weights/verify"),
    ("POST", "/v1/update_weights"),
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("GET", "/v1/is_paused"),
    ("POST", "/v1/abort_requests"),
    ("POST", "/v1/sleep"),
    ("POST", "/v1/wakeup"),
]
WITHOUT_INPUT = {"/v1/resume"}


@pytest.fixture(scope="module")
def api(served: Served[EchoEngine]) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.fixture(scope="module")
def control_api(model_dir: Path) -> Iterator[Any]:
    """An engine of its own: these routes leave it paused."""
    updates = Updates(address="ipc:///nowhere", secret_file="none", source="ipc:///nowhere")
    engine = EchoEngine(EngineConfig(model=str(model_dir), updates=updates))
    engine.offers = [Version(run="run", label="step_1", digest="1" * 32)]
    with serving(engine) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_the_list_of_operations_is_complete(api: Any) -> None:
    found = [result.ok() for result in api.get_all_operations()]
    assert sorted((operation.method.upper(), operation.path) for operation in found) == sorted(
        [*OPERATIONS, *CONTROL]
    )


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((method, path, GenerationMode.POSITIVE) for method, path in OPERATIONS),
        *((method, path, GenerationMode.NEGATIVE) for method, path in OPERATIONS if method == "POST"),
    ],
)
def test_answers_are_what_the_schema_says(api: Any, method: str, path: str, mode: GenerationMode) -> None:
    check(api[path][method], mode)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((method, path, GenerationMode.POSITIVE) for method, path in CONTROL),
        *(
            (method, path, GenerationMode.NEGATIVE)
            for method, path in CONTROL
            if method == "POST" and path not in WITHOUT_INPUT
        ),
    ],
)
def test_control_answers_are_what_the_schema_says(
    control_api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    check(control_api[path][method], mode)


def check(operation: Any, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=20)

    run()


ANSWERABLE: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "once upon", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}
"""A body for each route that is answered for certain: what is generated may be refused every time."""


@pytest.mark.parametrize("path", ANSWERABLE)
def test_streams_are_what_the_schema_says(api: Any, path: str) -> None:
    operation = api[path]["POST"]

    def streams(case: Any) -> bool:
        case.body = {**case.body, "stream": True, "model": None, "n": 1, "return_routed_experts": False}
        answer = case.call_and_validate(checks=CHECKS, timeout=20)
        return bool(answer.headers["content-type"][0].startswith("text/event-stream"))

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(case: Any) -> None:
        streams(case)

    run()
    assert streams(operation.Case(body=ANSWERABLE[path], media_type="application/json"))


def test_the_schema_promises_no_422(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for route in ("/v1/completions", "/v1/chat/completions"):
        assert set(paths[route]["post"]["responses"]) == {"200", "400", "404", "409", "429", "503", "default"}
