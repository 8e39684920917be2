"""`liveweight serve --snapshots DIR --restart-ranks`: the program outlives its ranks, and says over HTTP how it is."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import liveweight as lw
from tests.support.engine.engines import WITHIN_S, Models
from tests.support.processes.cli import Cli
from tests.support.processes.real_servers import until
from tests.support.processes.serve_processes import Client, alive, ended, program, ranks_of, url_of

GREEDY: dict[str, Any] = {
    "prompt": "the quick brown fox",
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Health(threading.Thread):
    """What `/health` says, in the order of its changes."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.said: list[dict[str, Any]] = []
        self._url, self._enough = url, threading.Event()
        self.start()

    def run(self) -> None:
        """Until told to stop."""
        with httpx.Client(base_url=self._url, timeout=WITHIN_S) as http:
            while not self._enough.wait(0.01):
                answer = http.get("/health")
                body = {**answer.json(), "code": answer.status_code}
                if not self.said or self.said[-1]["status"] != body["status"]:
                    self.said.append(body)

    def until(self, *statuses: str) -> None:
        """Wait until exactly these were answered, one after the other."""
        until(
            lambda: [body["status"] for body in self.said] == list(statuses), f"health that says {statuses}"
        )

    def end(self) -> None:
        """Ask no more."""
        self._enough.set()
        self.join(WITHIN_S)


@pytest.mark.timeout(300)
def test_a_program_whose_rank_is_killed_serves_on_at_the_same_version(
    models: Models, short_path: Path
) -> None:
    secret, address = short_path / "secret", f"ipc://{short_path}/engine.sock"
    options = ["--tp", "2", "--port", "0", "--restart-ranks", "--snapshots", str(short_path / "snapshots")]
    options += ["--secret-file", str(secret), "--weights-address", address]
    with program(str(models.directory()), *options) as started:
        url = url_of(started)
        with (
            httpx.Client(base_url=url, timeout=WITHIN_S) as http,
            lw.Publisher(
                models.directory(seed=1), engines=[address], secret=secret, directory=short_path / "trainer"
            ) as publisher,
        ):
            publisher.publish("step_1")
            until(lambda: http.get("/v1/weights").json()["snapshots"]["newest"] is not None, "a snapshot")
            before, version = http.post("/v1/completions", json=GREEDY).json(), _weights(http)["version"]
            client, health = Client(url), Health(url)
            client.until_begun()
            health.until("ok")
            first = ranks_of(started)
            os.kill(first[1].pid, signal.SIGKILL)
            health.until("ok", "pending_weights", "ok")
            health.end()
            client.until_ended()
            after = http.post("/v1/completions", json=GREEDY).json()
            found = _weights(http)
            assert (found["version"], found["recovery"]["behind"]) == (version, None)
            assert (found["recovery"]["origin"], found["recovery"]["restarts"]) == ("snapshot", 1)
            assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
            assert after["choices"][0]["weight_version"] == before["choices"][0]["weight_version"]
            publisher.publish("step_2")
            assert _weights(http)["version"]["label"] == "step_2"
            counted = http.get("/metrics").text
            second = ranks_of(started)
        started.terminate()
        code, errors = ended(started)
    assert code == 0
    for line in ('rounds_total{outcome="committed"} ', 'recoveries_total{behind="no"} ', 'version="step_2"'):
        assert line in counted
    error = json.loads(client.lines[-1])["error"]
    assert (client.broken, error["code"]) == (None, "LW-706")
    assert "rank 1" in error["message"]
    pending = health.said[1]
    assert (pending["code"], pending["error"]["code"]) == (503, "LW-706")
    assert "rank 1" in pending["error"]["message"]
    assert "starting its ranks again" in errors
    assert "serves step_1 again, from its snapshot" in errors
    assert alive([*first, *second]) == []


def _weights(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/v1/weights").json()
    return found


@pytest.mark.parametrize("options", [["--snapshot-every", "2"], ["--resume"], ["--keep-snapshots", "3"]])
def test_options_of_snapshots_need_a_directory(
    models: Models, short_path: Path, cli: Cli, options: list[str]
) -> None:
    failed = cli.run(short_path, "serve", models.directory(), "--port", "0", *options)
    assert (failed.returncode, failed.stderr.partition(" ")[0]) == (1, "LW-702")
    assert "--snapshots" in failed.stderr
