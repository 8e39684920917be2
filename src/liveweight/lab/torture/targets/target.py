"""The port of a target: an engine that serves clients, and updates of it that can be struck."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from liveweight.lab.torture.client_load import LoadTarget
from liveweight.lab.torture.fault_plan import Strike, StrikeMenu
from liveweight.lab.torture.fork_server import Forked

RECOVER_S = 180.0
"""How long an engine may take to serve again, and a trainer to be ready, before it counts as lost."""
CHECK_EVERY = 20
"""Check for leaks after every this many strikes."""
SLACK_S = 10.0
"""How long a wait may go past its deadline on a machine that is busy with the torture itself."""


@dataclass(slots=True)
class StrikeCounts:
    """The strikes so far, and their results."""

    struck: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    committed: int = 0
    late: int = 0
    lost: int = 0
    restarts: int = 0
    missed: int = 0
    notes: list[str] = field(default_factory=list)
    """Details of everything that was late or lost, and of rounds that failed without a strike."""

    def note(self, strike: Strike, moment: str, *, hit: bool) -> None:
        """Count a strike at this moment of the round. Not `hit`: there was nothing to strike."""
        self.struck[str(strike)] += 1
        self.moments[moment] += 1
        self.missed += not hit


class TortureTarget(Protocol):
    """A target, for the length of the `with`. For the torture's thread; `engine` is for the clients' threads, too."""

    counts: StrikeCounts
    attributed: bool
    """Whether its tokens name their version, or its answers the versions that may have served them."""
    menu: StrikeMenu
    check_every: int

    def engine(self) -> LoadTarget:
        """The current engine."""

    def takes(self, strike: Strike) -> bool:
        """Whether the strike is possible on this target."""

    def strike(self, strike: Strike) -> None:
        """Begin an update, strike it, and wait until the engine serves again and no update is under way."""

    def processes(self) -> dict[int, str]:
        """The names of the running processes, by process id."""

    def left(self) -> tuple[list[Forked], list[Path]]:
        """After the `with`: every process that ever ran, and files that must be gone."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
