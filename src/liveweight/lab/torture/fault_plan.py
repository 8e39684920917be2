"""What is done to a round, and when. Pure: the same seed gives the same strikes; which moment of the round each meets, the machine says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from liveweight.observe.events import OfferKind

Kind: TypeAlias = Literal["kill", "stop", "corrupt", "cut"]
Whom: TypeAlias = Literal["trainer", "rank", "server"]
After: TypeAlias = Literal["publish", "RoundOpened", "RankVerified", "VoteCast", "RoundCommitted"]
"""What a strike waits for: that publishing was asked for, or an event of the engine's leader. Ranks stage after the round is opened."""

MOMENTS: tuple[After, ...] = ("publish", "RoundOpened", "RankVerified", "VoteCast", "RoundCommitted")
_OFTEN = (2, 5, 2, 3, 1)
"""How often each is chosen: staging takes longest, and behind a commit little is left to strike."""
READING: tuple[After, ...] = ("publish", "RoundOpened")
"""When bytes are still being read: those that are corrupted later are nobody's any more."""
STOPS_S = (0.02, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeMenu:
    """What is done to whom, how often beside the others; and the part of all stops that nobody ends: until the engine gives the rank up, or
    the round is over without its trainer."""

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
"""For an engine of ranks that are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One of them. `part` of the time that comes after the moment goes by first; `number` chooses among ranks, bits and connections."""

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
    """Without an end. Of corrupted bytes only verified offers that are copies take notice: parameters may change on their own."""
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
