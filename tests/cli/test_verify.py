"""`liveweight verify`: a checkpoint beside what served engines hold; real ranks, real rounds, the program itself."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from tests.cli.test_push import said, secret_file
from tests.support.engine.engines import WITHIN_S, Models, forking
from tests.support.engine.flipping_hook import FLIPPED, NAME
from tests.support.processes.cli import Cli
from tests.support.processes.fork_server import Zygote
from tests.support.processes.http_server import Served, serving

DIFFERENT = 3


@contextmanager
def live(zygote: Zygote, place: Path, model: Path, tp: int) -> Iterator[Served[Engine]]:
    """A served engine whose weights can be damaged."""
    updates = Updates(address=f"ipc://{place}/engine.sock", secret_file=str(secret_file(place)))
    config = EngineConfig(model=str(model), tp=tp, threads=1, updates=updates, hooks=(NAME,), dtype="float32")
    with Engine(config, launch=forking(zygote)) as engine, serving(engine) as served:
        yield served


def test_it_says_what_equals_a_checkpoint_and_what_differs_on_which_rank(
    models: Models, short_path: Path, zygote: Zygote, cli: Cli
) -> None:
    old, new = (models.directory(mtp=True, seed=seed, dtype="bfloat16") for seed in (0, 1))
    with live(zygote, short_path, old, 2) as served:
        url, engine = served.url, served.engine
        start = cli.run(short_path, "verify", old, url)
        assert start.returncode == 0, start.stderr
        form = r"verified (\d+)/\1 tensors · digest ([0-9a-f]{32}) · serving initial\n"
        found = re.fullmatch(form, start.stdout)
        assert found is not None, start.stdout
        assert found[2] == engine.start.digest

        other = cli.run(short_path, "verify", new, url)
        assert other.returncode == DIFFERENT
        assert other.stderr.startswith("LW-401 ")
        assert re.search(r" and \d+ more differ on rank [01, ]+\. Serving initial\.\n$", other.stderr), (
            other.stderr
        )

        assert cli.run(short_path, "push", new, url, "--version", "step_1").returncode == 0
        pushed = cli.run(short_path, "verify", new, url)
        assert (pushed.returncode, pushed.stdout.endswith("serving step_1\n")) == (0, True), pushed.stderr
        over_http = httpx.post(f"{url}/v1/weights/verify", timeout=WITHIN_S).json()
        assert over_http["match"] is True
        assert f"digest {over_http['digest']}" in pushed.stdout

        os.kill(engine.pids[-1], signal.SIGUSR1)
        said(url)  # a step: the rank's main thread has run the handler
        damaged = cli.run(short_path, "verify", new, url)
        assert damaged.returncode == DIFFERENT
        assert damaged.stderr == f"LW-401 {FLIPPED} differs on rank 1. Serving step_1.\n"
        one = cli.run(short_path, "verify", new, url, "--name", "model.embed_tokens.weight")
        assert (one.returncode, one.stdout) == (0, "verified 1/1 tensors · serving step_1\n")

        assert cli.run(short_path, "undo", url).returncode == 0
        undone = cli.run(short_path, "verify", old, url)
        assert (undone.returncode, undone.stdout) == (0, start.stdout), undone.stderr


def test_what_cannot_be_compared_or_reached_is_said_with_another_exit_code(
    models: Models, short_path: Path, zygote: Zygote, cli: Cli
) -> None:
    model, nobody = models.directory(), "http://127.0.0.1:1"
    with live(zygote, short_path, model, 1) as served:
        both = cli.run(short_path, "verify", model, served.url, nobody)
        unknown = cli.run(short_path, "verify", model, served.url, "--name", "nobody")
        misfit = cli.run(short_path, "verify", models.directory("qwen3_moe"), served.url)
        empty = cli.run(short_path, "verify", short_path, served.url)
    assert both.returncode == 1
    assert both.stdout.startswith(f"{served.url}: verified ")
    assert both.stderr.startswith(f"{nobody}: LW-205 {nobody} cannot be reached")
    assert (unknown.returncode, "nobody unexpected" in unknown.stderr) == (1, True)
    assert misfit.returncode == DIFFERENT
    assert misfit.stderr.startswith("LW-101 refused: model.layers.0.mlp."), misfit.stderr
    assert "missing in the checkpoint" in misfit.stderr
    assert (empty.returncode, empty.stderr.partition(" ")[0]) == (1, "LW-102")
