"""The fault plan: what is done to a round, and when. Pure: the same seed gives the same strikes. The exact time depends on the machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from liveweight.observe.events import OfferKind

Kind: TypeAlias = Literal["kill", "stop", "corrupt", "cut"]
Whom: TypeAlias = Literal["trainer", "rank", "server"]
After: TypeAlias = Literal["publish", "RoundOpened", "RankVerified", "VoteCast", "RoundCommitted"]
"""What a strike waits for: the call of publish, or an event of the engine's leader. Ranks stage after the round is opened."""

MOMENTS: tuple[After, ...] = ("publish", "RoundOpened", "RankVerified", "VoteCast", "RoundCommitted")
_OFTEN = (2, 5, 2, 3, 1)
"""How often each moment is chosen: staging takes longest, and after a commit little is left to strike."""
READING: tuple[After, ...] = ("publish", "RoundOpened")
"""The moments at which bytes are still being read: corrupting them later has no effect."""
STOPS_S = (0.02, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeMenu:
    """The strikes that a target takes, each with its relative frequency; and the share of stops that are not continued until the engine has
    given the rank up, or the round is over without its trainer."""

    kinds: tuple[tuple[Kind, Whom, int], ...]
    forever: float


MENU = StrikeMenu(
    kinds=(
        ("kill", "trainer", 6),
        ("kill", "rank", 3),
        ("stop", "trainer", 3),
        ("stop", "rank", 3),
        ("corrupt", "trainer", 4),
        ("cut", "trainer", 4),
        ("cut", "rank", 2),
    ),
    forever=0.06,
)
"""For an engine that replaces lost ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One strike, which falls after the share `part` of the time after the moment; `number` chooses among ranks, bits and connections."""

    kind: Kind
    whom: Whom
    after: After
    part: float
    number: int
    stop_s: float | None
    offer: OfferKind
    verify: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.whom}"


def strikes(seed: int, menu: StrikeMenu = MENU) -> Iterator[Strike]:
    """An endless sequence of strikes. Corrupts only verified offers that are copies: live parameters may change without being an error."""
    chance = random.Random(f"{seed} torture")
    kinds = [(kind, whom) for kind, whom, often in menu.kinds for _ in range(often)]
    while True:
        kind, whom = chance.choice(kinds)
        offers: tuple[OfferKind, ...] = (
            ("frozen", "ring") if kind == "corrupt" else ("frozen", "live", "ring")
        )
        yield Strike(
            kind=kind,
            whom=whom,
            after=chance.choice(READING) if kind == "corrupt" else chance.choices(MOMENTS, _OFTEN)[0],
            part=chance.random(),
            number=chance.randrange(1 << 30),
            stop_s=None if chance.random() < menu.forever else chance.uniform(*STOPS_S),
            offer=chance.choice(offers),
            verify=kind == "corrupt" or chance.random() < 0.75,
        )
