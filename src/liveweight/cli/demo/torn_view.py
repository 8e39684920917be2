"""How the torn demo looks: two columns on a terminal, lines elsewhere, nothing where JSON was asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from liveweight.lab.torn_demo.judge import Kind, TokenCounts

if TYPE_CHECKING:
    from liveweight.lab.torn_demo.torn_demo import Side, TornSettings, TornView

STYLES: dict[Kind, str] = {"old": "", "new": "green", "neither": "bold red"}
ANSWERS_SHOWN, NOTES_SHOWN, REFRESHES_PER_S = 6, 5, 8


class SilentView:
    """Says nothing."""

    def note(self, side: Side | None, text: str) -> None:
        """See View."""

    def judged(self, side: str, words: Sequence[str], kinds: Sequence[Kind]) -> None:
        """See View."""


class PlainView:
    """What happened, a line each; answers are only counted."""

    def note(self, side: Side | None, text: str) -> None:
        """See View."""
        print(f"{side or 'both':6} {text}", flush=True)

    def judged(self, side: str, words: Sequence[str], kinds: Sequence[Kind]) -> None:
        """See View."""


class TerminalView:
    """Two columns: the last answers, every token in the colour of what it is; then the counts, and what happened."""

    def __init__(self, settings: TornSettings) -> None:
        paused = "paused meanwhile" if settings.paused else "serving meanwhile"
        self._titles = {"left": f"buckets written in place, {paused}", "right": "liveweight"}
        self._lock = threading.Lock()
        self._answers: dict[str, deque[Text]] = {side: deque(maxlen=ANSWERS_SHOWN) for side in self._titles}
        self._notes: dict[str, deque[str]] = {side: deque(maxlen=NOTES_SHOWN) for side in self._titles}
        self._counts = {side: TokenCounts() for side in self._titles}

    def note(self, side: Side | None, text: str) -> None:
        """See View."""
        with self._lock:
            for each in self._titles if side is None else (side,):
                self._notes[each].append(text)

    def judged(self, side: str, words: Sequence[str], kinds: Sequence[Kind]) -> None:
        """See View."""
        line = Text(overflow="ellipsis", no_wrap=True)
        for word, kind in zip(words, kinds, strict=True):
            line.append(word, STYLES[kind])
        with self._lock:
            self._answers[side].append(line)
            self._counts[side] += TokenCounts.of(kinds)

    def __rich__(self) -> RenderableType:
        """As it is now."""
        table = Table.grid(expand=True)
        for _ in self._titles:
            table.add_column(ratio=1)
        with self._lock:
            table.add_row(*(self._column(side) for side in self._titles))
        return table

    def _column(self, side: str) -> Panel:
        counts = self._counts[side]
        told = Text.assemble(
            f"old {counts.old} · ",
            (f"new {counts.new}", STYLES["new"]),
            " · ",
            (f"neither {counts.neither}", STYLES["neither"] if counts.neither else ""),
            f" of {counts.total} tokens",
        )
        answers = [*self._answers[side], *[Text()] * (ANSWERS_SHOWN - len(self._answers[side]))]
        notes = [Text(note, "dim") for note in self._notes[side]]
        notes += [Text()] * (NOTES_SHOWN - len(notes))
        return Panel(Group(*answers, Text(), told, Text(), *notes), title=self._titles[side])


@contextmanager
def viewing(settings: TornSettings, *, silent: bool) -> Iterator[TornView]:
    """The view that fits where the output goes."""
    console = Console()
    if silent:
        yield SilentView()
    elif not console.is_terminal:
        yield PlainView()
    else:
        view = TerminalView(settings)
        with Live(view, console=console, refresh_per_second=REFRESHES_PER_S):
            yield view
