"""What can be tortured: an engine that clients ask, and a way of updating it that can be struck."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from liveweight.lab.torture.client_load import LoadTarget
from liveweight.lab.torture.fault_plan import Strike, StrikeMenu
from liveweight.lab.torture.fork_server import Forked

RECOVER_S = 180.0
"""How long an engine may take to serve again, and a trainer to stand ready, before it counts as lost."""
LOOK_EVERY = 20
"""After so many strikes leaks are looked for."""
SLACK_S = 10.0
"""What a wait may take beyond its deadline on a machine that is busy with the torture itself."""


@dataclass(slots=True)
class StrikeCounts:
    """What came of the strikes."""

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
    """What is known of everything that was late or lost, and of rounds that failed though nobody struck them."""

    def note(self, strike: Strike, moment: str, *, hit: bool) -> None:
        """A strike fell, after that was said; not `hit`: there was nothing to strike."""
        self.struck[str(strike)] += 1
        self.moments[moment] += 1
        self.missed += not hit


class TortureTarget(Protocol):
    """One of them, while the `with` lasts. For the torture's thread; `engine` for the clients' too."""

    counts: StrikeCounts
    attributed: bool
    """Whether its tokens say which version they came from, or its answers which they may have come from."""
    menu: StrikeMenu
    look_every: int

    def engine(self) -> LoadTarget:
        """The present engine."""

    def takes(self, strike: Strike) -> bool:
        """Whether there is anything to strike that way."""

    def strike(self, strike: Strike) -> None:
        """Begin an update, strike it, and wait until the engine serves again and no update is under way."""

    def processes(self) -> dict[int, str]:
        """Those that run now, by id, and what they are."""

    def left(self) -> tuple[list[Forked], list[Path]]:
        """After the `with`: every process that there was, and files that must be gone."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
