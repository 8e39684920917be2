"""`python -c CODE`, forked: the code finds imported what takes long."""

from __future__ import annotations

from typing import Any


def main(config: dict[str, Any]) -> None:
    """The config has the code."""
    exec(compile(config["code"], "<string>", "exec"), {"__name__": "__main__"})
