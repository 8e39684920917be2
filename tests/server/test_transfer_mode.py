"""The transfer mode that an engine is started with, of updates that are asked for; and NIXL in a served engine, which keeps to itself."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from liveweight.engine.config import Updates
from liveweight.errors import EngineConfigInvalid, Refused
from tests.cli.test_push import ASK, said, secret_file
from tests.server.test_requested_updates import offering
from tests.support.engine.engines import WITHIN_S, Models
from tests.support.processes.cli import Cli
from tests.support.processes.serve_processes import program, url_of


def test_an_engine_started_for_gdr_refuses_other_offers_unless_asked_and_ucx_writes_nothing_to_its_terminal(
    models: Models, short_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")  # what it would say at every start of an agent
    monkeypatch.delenv("UCX_LOG_FILE", raising=False)
    address, secret = f"ipc://{short_path}/s/source.sock", str(secret_file(short_path))
    source = (models.directory(seed=1), "--version", "step_1", "--address", address, "--secret-file", secret)
    arguments = ("--tp", "2", "--port", "0", "--secret-file", secret, "--weights-from", address)
    with program(str(models.directory()), *arguments, "--transfer-mode", "gdr") as server:
        url = url_of(server)
        with offering(cli, short_path, *source):
            refused = cli.run(short_path, "update", url)
        with offering(cli, short_path, *source, "--transfer-mode", "gdr"):
            taken = cli.run(short_path, "update", url)
        with offering(cli, short_path, *source, "--run", "other"):
            asked = cli.run(short_path, "update", url, "--transfer-mode", "ipc")
        label = said(url)["weight_version"]["label"]
        server.terminate()
        output, errors = server.communicate(timeout=WITHIN_S)
    assert (refused.returncode, taken.returncode, asked.returncode) == (1, 0, 0), (taken.stderr, asked.stderr)
    assert "over gdr, the source offers step_1 over ipc" in refused.stderr
    assert (label, server.returncode) == ("step_1", 0)
    assert (output, errors) == ("", "")


@pytest.mark.parametrize("mode", ["gdr", "ipc"])
def test_the_seeds_own_curl_line_updates_an_engine_that_awaits_its_weights(
    models: Models, short_path: Path, mode: str, cli: Cli
) -> None:
    if mode == "gdr":
        pytest.importorskip("nixl")
    address, secret = f"ipc://{short_path}/s/source.sock", str(secret_file(short_path))
    source = (models.directory(seed=1), "--version", "step_100", "--address", address)
    waiting = ("--weights-from", address, "--await-weights", "--fastdeploy")
    with cli.serving(short_path, models.directory(), *waiting) as (url, _):
        health = httpx.get(f"{url}/health", timeout=WITHIN_S)
        assert (health.status_code, health.json()["status"]) == (503, "pending_weights")
        refused = httpx.post(f"{url}/v1/completions", json=ASK, timeout=WITHIN_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "LW-707")
        with offering(cli, short_path, *source, "--secret-file", secret, "--transfer-mode", mode):
            curl = f"""curl -s -X POST {url}/v1/update_weights -H "Content-Type: application/json" """
            line = curl + f"""-d '{{"version": "step_100", "transfer_mode": "{mode}"}}'"""
            ran = subprocess.run(shlex.split(line), capture_output=True, timeout=WITHIN_S, check=True)
        answer = json.loads(ran.stdout)
        assert (answer["status"], answer["error_message"]) == ("success", None), answer
        assert [one["version"] for one in answer["result"]] == ["step_100"] * 2
        assert httpx.get(f"{url}/health", timeout=WITHIN_S).status_code == 200
        assert said(url)["weight_version"]["label"] == "step_100"


def test_a_push_over_gdr_reaches_an_engine(models: Models, short_path: Path, cli: Cli) -> None:
    pytest.importorskip("nixl")
    with cli.serving(short_path, models.directory()) as (url, _):
        pushed = cli.run(
            short_path, "push", models.directory(seed=1), url, "--version", "step_1", "--transfer-mode", "gdr"
        )
        assert pushed.returncode == 0, pushed.stderr
        assert said(url)["weight_version"]["label"] == "step_1"


def test_a_mode_that_is_not_there_or_for_nothing_is_refused_at_the_start() -> None:
    place: dict[str, Any] = {"address": "ipc:///engine.sock", "secret_file": "secret"}
    with pytest.raises(Refused, match="unknown transfer mode 'pigeon'"):
        Updates(**place, source="ipc:///source.sock", transfer_mode="pigeon")
    with pytest.raises(EngineConfigInvalid, match="no source of them was given"):
        Updates(**place, transfer_mode="gdr")
