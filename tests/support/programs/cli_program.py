"""`liveweight` with its arguments, forked from where all that it imports is there; the ranks of an engine that it serves are forked, too.

How the program starts, and how its ranks do, is for tests that execute it: tests/server/test_serve_real.py, tests/docs/test_readme.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import liveweight.api
import liveweight.checkpoint
import liveweight.observe.metrics
import liveweight.server.app
import liveweight.server.client
import liveweight.server.server
from liveweight.cli import main as cli
from liveweight.cli.commands import serve
from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.observe.bus import Bus
from tests.support.processes.spare_ranks import spare_ranks
from tests.support.programs import serve_program

del liveweight


def main(config: dict[str, Any]) -> None:
    """The config has the arguments, the variables that differ from the zygote's, and whether an echo is served in place of a model."""
    os.environ.update(config["environ"])
    tempfile.tempdir = None  # what the zygote found there may be another one
    arguments: list[str] = config["arguments"]
    if config["echo"]:
        serve._start = serve_program.start
    elif arguments[0] == "serve":
        start_with_spares(_ranks(arguments))
    sys.argv = ["liveweight", *arguments]
    cli.run()


def _ranks(arguments: list[str]) -> int:
    return int(arguments[arguments.index("--tp") + 1]) if "--tp" in arguments else 1


def start_with_spares(world: int) -> None:
    """The program's engine is to have ranks that are forked now."""
    launch = spare_ranks({} for _ in range(world))

    def start(config: EngineConfig, bus: Bus) -> Engine:
        return Engine(config, bus=bus, launch=launch)

    serve._start = start
