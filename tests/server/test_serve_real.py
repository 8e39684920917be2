"""`liveweight serve` with a real model: what its signals, its ranks' deaths and its own do to clients and processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from liveweight.server.server import bind
from tests.support.engine.engines import Models
from tests.support.processes.cli import Cli
from tests.support.processes.real_servers import until
from tests.support.processes.serve_processes import Client, alive, ended, program, ranks_of, url_of

SECONDS = 15.0
"""A few, for a machine that is busy otherwise."""


def test_at_sigterm_a_running_stream_finishes_and_no_process_is_left(models: Models) -> None:
    with program(str(models.directory(mtp=True)), "--tp", "2", "--port", "0", "--grace", "60") as started:
        client = Client(url := url_of(started), max_tokens=250, return_token_ids=True)
        client.until_begun()
        ranks = ranks_of(started)
        started.terminate()
        with httpx.Client(base_url=url) as http:
            until(lambda: http.get("/health").json()["status"] == "stopping", "a server that stops")
            refused = http.post("/v1/completions", json={"prompt": "a"})
        assert ended(started) == (0, "")
        client.until_ended()
    assert refused.status_code == 503
    *chunks, done = client.lines
    assert (client.broken, done) == (None, "[DONE]")
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "length"
    assert sum(len(choice["token_ids"]) for choice in choices) == 250
    assert alive(ranks) == []


def poll_health(url: str, until_gone: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What `/health` says, again and again, until nobody answers any more."""
    said: list[dict[str, Any]] = []
    with httpx.Client(base_url=url, timeout=SECONDS) as http:

        def gone() -> bool:
            try:
                said.append(http.get("/health").json())
            except httpx.TransportError:
                return True
            return until_gone.poll() is not None

        until(gone, "a server that has ended", SECONDS)
    return said


def test_a_killed_rank_is_named_to_clients_and_health_and_the_program_ends_with_3(models: Models) -> None:
    with program(str(models.directory()), "--tp", "2", "--port", "0") as started:
        url = url_of(started)
        clients = [Client(url) for _ in range(3)]
        for client in clients:
            client.until_begun()
        ranks = ranks_of(started)
        os.kill(ranks[1].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        said = poll_health(url, started)
        assert all(client.until_ended() - killed_s < SECONDS for client in clients)
        code, errors = ended(started)
    assert said[-1]["status"] == "failed"
    assert "rank 1" in said[-1]["error"]["message"]
    for client in clients:
        error = json.loads(client.lines[-1])["error"]
        assert (client.broken, error["code"]) == (None, "LW-706")
        assert "rank 1" in error["message"]
    assert code == 3
    assert errors.startswith("LW-706 rank 1 ")
    assert "Traceback" not in errors
    assert alive(ranks) == []


def test_the_ranks_of_a_killed_program_end_by_themselves(models: Models) -> None:
    with program(str(models.directory()), "--tp", "2", "--port", "0") as started:
        client = Client(url_of(started))
        client.until_begun()
        ranks = ranks_of(started)
        started.kill()
        until(lambda: not alive(ranks), "ranks that end with their program", SECONDS)
        client.until_ended()
    assert client.broken is not None


def broken(original: Path, directory: Path, **fields: object) -> str:
    """A copy of a model with another configuration; without any fields, with weights that are cut off."""
    shutil.copytree(original, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if not fields:
        weights = directory / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 5000)
    return str(directory)


def test_what_keeps_a_model_from_being_served_is_one_line_with_a_remedy(
    models: Models, tmp_path: Path, short_path: Path, cli: Cli
) -> None:
    model = models.directory()
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            ("LW-701", "model.safetensors"): [broken(model, tmp_path / "cut"), "--tp", "2"],
            ("LW-701", "LlamaForCausalLM"): [
                broken(model, tmp_path / "other", architectures=["LlamaForCausalLM"])
            ],
            ("LW-702", "tp 3 does not divide"): [str(model), "--tp", "3"],
            ("LW-702", f"port {port}: Address already in use"): [str(model), "--tp", "2", "--port", port],
        }
        for (number, said), given in cases.items():
            failed = cli.run(short_path, "serve", "--port", "0", *given)
            line, _, remedy = failed.stderr.partition(". What to do: ")
            found = (failed.returncode, line.partition(" ")[0], said in line, remedy.count("\n"))
            assert found == (1, number, True, 1), failed.stderr
