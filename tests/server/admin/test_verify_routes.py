"""`POST /v1/weights/verify`: what it takes, what it answers, and an honest status for whatever comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liveweight.engine.config import EngineConfig, Updates
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    RankLost,
    ReplicaIncomplete,
    RoundAborted,
    WeightsExchanged,
    WrongState,
)
from liveweight.server.client import EngineClient
from liveweight.server.request_guard import AccessRules
from liveweight.spec.manifest import Version
from tests.support.engine.echo_engine import EchoEngine
from tests.support.engine.echo_weights import HELD
from tests.support.processes.http_server import Served, serving

VERIFY = "/v1/weights/verify"
START = {"run": "start", "label": "initial", "digest": "0" * 32, "number": None}
OFFERED = Version(run="r", label="b", digest="b" * 32)
FORMS: dict[str, dict[str, Any]] = {
    spec.name: {"dtype": spec.dtype.value, "shape": list(spec.shape), "digest": spec.digest} for spec in HELD
}
NORM, HEAD = FORMS


def engine_of(model_dir: Path, *, updates: bool = True) -> EchoEngine:
    given = Updates(address="ipc:///run/me/engine.sock", secret_file="none", source="ipc:///run/me/source")
    engine = EchoEngine(EngineConfig(model=str(model_dir), updates=given if updates else None))
    engine.offers = [OFFERED]
    return engine


@pytest.fixture
def live(model_dir: Path) -> Iterator[Served[EchoEngine]]:
    with serving(engine_of(model_dir)) as running:
        yield running


def test_without_a_body_everything_is_compared_with_what_is_installed(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        answer = http.post(VERIFY)
    assert answer.status_code == 200
    assert answer.json() == {
        "match": True,
        "against": "installed",
        "compared_with": START,
        "version": START,
        "found": START,
        "digest": HELD.digest(),
        "tensors": 2,
        "compared": 2,
        "differing": 0,
        "mismatches": [],
        "ranks": [{"rank": 0, "seconds": 0.25}],
    }
    assert live.engine.verify_requests[0].timeout_s == 60.0


def test_what_differs_is_named_and_is_no_error(live: Served[EchoEngine]) -> None:
    live.engine.damaged = True
    with live.http() as http:
        said = http.post(VERIFY).json()
        some = http.post(VERIFY, json={"names": [HEAD]}).json()
    assert (said["match"], said["found"], said["differing"]) == (False, None, 1)
    assert said["mismatches"] == [{"name": NORM, "ranks": [0]}]
    assert said["digest"] != HELD.digest()
    assert (some["match"], some["tensors"], some["digest"]) == (True, 1, None)


def test_digests_are_listed_if_asked_for(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        said = http.post(VERIFY, json={"digests": True, "names": ["embed.weight"]}).json()
    (listed,) = said["digests"]
    assert listed == {"name": HEAD, "aliases": ["embed.weight"], **FORMS[HEAD]}


def test_a_manifest_of_all_or_some_tensors_takes_the_place_of_what_is_installed(
    live: Served[EchoEngine],
) -> None:
    other = {**FORMS, NORM: {**FORMS[NORM], "digest": "f" * 32}}
    with live.http() as http:
        same = http.post(VERIFY, json={"manifest": FORMS}).json()
        differing = http.post(VERIFY, json={"manifest": other, "against": "manifest"}).json()
        part = http.post(VERIFY, json={"manifest": {HEAD: FORMS[HEAD]}}).json()
    assert (same["match"], same["against"], same["compared_with"]) == (True, "manifest", None)
    assert (differing["match"], [one["name"] for one in differing["mismatches"]]) == (False, [NORM])
    assert (part["match"], part["tensors"], part["found"]) == (True, 1, None)


def test_the_source_is_compared_with_at_its_newest_or_at_a_version_of_it(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        newest = http.post(VERIFY, json={"against": "source"}).json()
        named = http.post(VERIFY, json={"against": "source", "version": "b"}).json()
        absent = http.post(VERIFY, json={"against": "source", "version": "c"})
    assert newest == named
    assert (newest["match"], newest["compared_with"]["label"]) == (True, "b")
    assert (absent.status_code, absent.json()["error"]["code"]) == (409, "LW-105")
    assert absent.json()["error"]["offered"] == ["b"]


BAD: dict[str, tuple[Any, str | None]] = {
    "no object": ([], None),
    "an unknown field": ({"name": NORM}, "name"),
    "an unknown side": ({"against": "nothing"}, "against"),
    "no names": ({"names": []}, "names"),
    "names that are no list": ({"names": NORM}, "names"),
    "a name that nobody has": ({"names": [NORM, "nobody.weight"]}, "names"),
    "a manifest of a name that nobody has": ({"manifest": {"nobody.weight": FORMS[NORM]}}, "manifest"),
    "a manifest of another shape": ({"manifest": {NORM: {**FORMS[NORM], "shape": [5]}}}, "manifest"),
    "an empty manifest": ({"manifest": {}}, "manifest"),
    "an unknown dtype": ({"manifest": {NORM: {**FORMS[NORM], "dtype": "f4"}}}, f"manifest.{NORM}.dtype"),
    "no digest": ({"manifest": {NORM: {**FORMS[NORM], "digest": "abc"}}}, f"manifest.{NORM}.digest"),
    "no manifest": ({"against": "manifest"}, "manifest"),
    "a manifest beside another side": ({"against": "source", "manifest": FORMS}, "manifest"),
    "a version of what is installed": ({"version": "b"}, "version"),
    "no time": ({"timeout_s": 0}, "timeout_s"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_body_that_is_wrong_is_a_422_that_names_the_field(live: Served[EchoEngine], case: str) -> None:
    body, param = BAD[case]
    with live.http() as http:
        answer = http.post(VERIFY, json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["param"] == param
    if "nobody" in case:
        assert "nobody.weight unexpected" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "LW-101"


@pytest.mark.parametrize(
    ("objection", "status"),
    [
        (WeightsExchanged("weights were exchanged while they were digested"), 409),
        (WrongState("in doubt about the last commit", "verify"), 409),
        (ReplicaIncomplete("waiting for rank 1 to join"), 409),
        (DeadlineExceeded("rank 1 to digest its weights", 2.0), 504),
        (RankLost("rank 1 ended"), 503),
        (ChannelClosed("rank 1 (process 7) is gone"), 503),
        (RoundAborted("the leader was closed"), 503),
    ],
    ids=lambda given: getattr(given, "code", None),
)
def test_a_verification_that_fails_has_an_honest_status_and_names_who(
    live: Served[EchoEngine], objection: LiveWeightError, status: int
) -> None:
    live.engine.objection = objection
    with live.http() as http:
        answer = http.post(VERIFY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, objection.code)
    assert str(objection) in answer.json()["error"]["message"]
    with pytest.raises(type(objection)):
        EngineClient(live.url).verify({}, 10.0)


def test_an_engine_without_updates_refuses_it(model_dir: Path) -> None:
    with serving(engine_of(model_dir, updates=False)) as served, served.http() as http:
        answer = http.post(VERIFY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "LW-107")


def test_it_needs_the_control_key(model_dir: Path) -> None:
    with (
        serving(engine_of(model_dir), AccessRules(api_key="a", control_key="c")) as served,
        served.http() as http,
    ):
        codes = [
            http.post(VERIFY, headers={"authorization": f"Bearer {key}"}).status_code for key in ("a", "c")
        ]
    assert codes == [401, 200]
