"""Mode x offer x hosts: the cells in which the faults of a round are tried, generated from the registry of transfer modes.

Files have no source that could be lost while ranks read: their faults are a suite of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from liveweight.transports.registry import TRANSPORTS
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.two_hosts import ENGINE, NoNamespaces, two_hosts
from tests.support.rounds import WORLD

Hosts = Literal["one", "two"]
HOSTS: dict[str, tuple[Hosts, ...]] = {"one host": ("one",), "any host": ("one", "two"), "files": ()}
"""Where a mode of that reach is tried."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A transfer mode, a kind of offer, and whether trainer and engine are on one host or on two."""

    mode: str
    offer: str
    hosts: Hosts

    def __str__(self) -> str:
        return f"{self.mode}-{self.offer}-{self.hosts}"

    @property
    def quick(self) -> bool:
        """Whether it is tried in every run of the tests: shared memory, and one cell of those over NIXL. The others are for `make soak`."""
        return self.mode == "ipc" or str(self) == "gdr-live-one"


CELLS = tuple(
    Cell(name, kind, hosts)
    for name, mode in sorted(TRANSPORTS.items())
    for kind in mode.offers
    for hosts in HOSTS[mode.reach]
)


def in_cells(*, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test in every cell but those with these offers: its `scene`."""
    chosen = [cell for cell in CELLS if cell.offer not in but]
    marks = {True: (), False: (pytest.mark.soak,)}
    params = [pytest.param(cell, id=str(cell), marks=marks[cell.quick]) for cell in chosen]
    return pytest.mark.parametrize("scene", params, indirect=True)


class Scene:
    """A cell's processes: a replica of two ranks and its trainers."""

    def __init__(self, cluster: Cluster, cell: Cell, *, engine: str | None, trainer: str | None) -> None:
        """`engine` and `trainer` are the hosts, where those are two."""
        self.cluster, self.cell = cluster, cell
        self.address = cluster.address() if engine is None else f"tcp://{ENGINE}:7412"
        self._engine = {} if engine is None else {"host": engine}
        self._trainer = {} if trainer is None else {"host": trainer}

    def replica(self, **options: Any) -> list[Program]:
        """Its ranks, ready."""
        return self.cluster.replica(WORLD, address=self.address, **self._engine, **options)

    def trainer(self, **options: Any) -> Program:
        """A trainer that is connected to the replica."""
        config: dict[str, Any] = {
            "offer": self.cell.offer,
            "transfer_mode": self.cell.mode,
            "engines": [self.address],
        }
        return self.cluster.trainer(**config | self._trainer | options)

    def ready(self, **options: Any) -> tuple[list[Program], Program]:
        """A replica at version 1, and its trainer."""
        ranks, trainer = self.replica(), self.trainer(**options)
        assert "error" not in trainer.ask("publish", label=1)
        return ranks, trainer


@contextmanager
def scene_of(cluster: Cluster, cell: Cell) -> Iterator[Scene]:
    """The cell's hosts, for as long as the test; skipped where they cannot be made, or NIXL is not installed."""
    if TRANSPORTS[cell.mode].extra is not None:
        pytest.importorskip(str(TRANSPORTS[cell.mode].extra))
    with ExitStack() as stack:
        engine = trainer = None
        if cell.hosts == "two":
            try:
                hosts = stack.enter_context(two_hosts())
            except NoNamespaces as error:
                pytest.skip(str(error))
            engine, trainer = hosts.engine, hosts.trainer
        yield Scene(cluster, cell, engine=engine, trainer=trainer)
