"""A rank of the embedded engine, forked from the zygote: standard input is its end of the stream."""

from __future__ import annotations

import os
from typing import Any

import liveweight.engine.loading
import liveweight.engine.models.model
from liveweight.engine import rank

del liveweight


def main(config: dict[str, Any]) -> None:
    """Be a rank until the stream ends."""
    del config
    rank.main(os.dup(0), parent=None)
