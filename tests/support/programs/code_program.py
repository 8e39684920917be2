"""`python -c CODE`, forked: the code finds imported what takes long, and an engine that it makes finds its ranks forked."""

from __future__ import annotations

import os
from typing import Any

from liveweight.engine.engine import Engine
from tests.support.processes.spare_ranks import spare_ranks


def main(config: dict[str, Any]) -> None:
    """The config has the code, how many ranks it is going to start, and whether it has a process group of its own."""
    if config["apart"]:
        os.setpgid(0, 0)
    if config["ranks"]:
        defaults: Any = Engine.__init__.__kwdefaults__
        defaults["launch"] = spare_ranks({} for _ in range(config["ranks"]))
    exec(compile(config["code"], "<string>", "exec"), {"__name__": "__main__"})
