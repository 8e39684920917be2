"""A process that writes snapshots, or prunes them, over and over, until it is killed or gets the stop command."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from liveweight.transports.snapshot.disk.store import Store
from tests.support.programs.program import Console
from tests.support.snapshots import save_label


def main(config: dict[str, Any]) -> None:
    """The config has `role` (`write`, `prune` or `both`), `store`, and the `first` label."""
    console, store = Console(), Store(Path(config["store"]))
    console.send(ready="")
    for label in itertools.count(config["first"]):
        if not console.commands.empty():
            break
        if config["role"] in ("write", "both"):
            save_label(store, label, world=2, progress=lambda size: console.send(wrote=size))
            console.send(saved=label)
        if config["role"] in ("prune", "both"):
            store.prune(1)
