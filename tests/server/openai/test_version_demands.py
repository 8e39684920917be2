"""Requests that demand a version: answered by it, or refused with 409 before anything of them is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from liveweight.spec.manifest import Version
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
STEP_9 = Version(run="r", label="step_9", digest="9" * 32, number=3)


@pytest.fixture
def third(own: Served[EchoEngine]) -> Served[EchoEngine]:
    """An engine that serves the third version of its run."""
    own.engine.reported = replace(own.engine.reported, serving=STEP_9)
    return own


MET = [{"min": 3}, {"min": 0}, {"exact": "step_9"}, {"min": 2, "exact": "step_9", "run": "r"}]
UNMET = [{"min": 4}, {"exact": "step_10"}, {"min": 1, "run": "s"}, {"exact": "step_9", "run": "s"}]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("demand", MET)
def test_a_demand_that_the_version_meets_is_answered(
    third: Served[EchoEngine], route: str, demand: dict[str, Any]
) -> None:
    with third.http() as http:
        assert http.post(route, json={**BODIES[route], "weight_version": demand}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("demand", UNMET)
def test_any_other_is_refused_with_what_serves_before_anything_is_taken(
    third: Served[EchoEngine], route: str, demand: dict[str, Any], stream: bool
) -> None:
    with third.http() as http:
        answer = http.post(route, json={**BODIES[route], "weight_version": demand, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("LW-114", "conflict_error", "weight_version")
    assert error["demanded"] == demand
    assert error["serving"] == {"run": "r", "label": "step_9", "digest": "9" * 32, "number": 3}
    assert "step_9" in error["message"]
    assert third.engine.status().counts.prompt_tokens == 0


def test_weights_without_a_number_meet_no_smallest_number(own: Served[EchoEngine]) -> None:
    with own.http() as http:
        refused = http.post(
            "/v1/completions", json={**BODIES["/v1/completions"], "weight_version": {"min": 0}}
        )
        exact = http.post(
            "/v1/completions", json={**BODIES["/v1/completions"], "weight_version": {"exact": "initial"}}
        )
    assert refused.json()["error"]["serving"]["number"] is None
    assert (refused.status_code, exact.status_code) == (409, 200)
