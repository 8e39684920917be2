"""A rank whose collectives are counted, by name; the counts are written where the test says, when the rank ends."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from liveweight.engine.rank import process, rank_group


class Counting:
    """A group, or what is below it, that counts every call of every method."""

    def __init__(self, inner: Any, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        def called(*arguments: Any) -> Any:
            self._counts[name] += 1
            return method(*arguments)

        return called


def main(config: dict[str, Any]) -> None:
    """Be a rank until the stream ends."""
    counts: Counter[str] = Counter()
    make, join = rank_group.collectives, rank_group.join_group
    rank_group.collectives = lambda *arguments: Counting(make(*arguments), counts)
    vars(process)["join_group"] = lambda **arguments: Counting(join(**arguments), counts)
    process.main(os.dup(0), parent=None)
    Path(config["counts"]).write_text(json.dumps(counts))
