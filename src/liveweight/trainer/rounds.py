"""The record of one round at its publisher: what was offered to whom, and how far it has come."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.trainer.drive import Drive
from liveweight.trainer.offers import Made
from liveweight.trainer.part import Part
from liveweight.trainer.report import Report


@dataclass(slots=True)
class Round:
    """`strayed`: why its live offer must not be committed. Known before `staged` is set."""

    version: Version
    made: Made
    parts: list[Part]
    deadline: Deadline
    began_s: float
    drive: Drive | None = None
    outcome: Future[Report] = field(default_factory=Future)
    staged: threading.Event = field(default_factory=threading.Event)
    strayed: str | None = None
