"""What the torn demo prints while it runs: two columns on a terminal, lines elsewhere, nothing with --json."""

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
    """Prints nothing."""

    def note(self, side: Side | None, text: str) -> None:
        """See TornView."""

    def judged(self, side: str, texts: Sequence[str], kinds: Sequence[Kind]) -> None:
        """See TornView."""


class PlainView:
    """Prints each event as a line; answers are not printed."""

    def note(self, side: Side | None, text: str) -> None:
        """See TornView."""
        print(f"{side or 'both':6} {text}", flush=True)

    def judged(self, side: str, texts: Sequence[str], kinds: Sequence[Kind]) -> None:
        """See TornView."""


class TerminalView:
    """Two columns: the last answers, every token in the colour of its kind; then the counts and the events."""

    def __init__(self, settings: TornSettings) -> None:
        paused = "paused meanwhile" if settings.paused else "serving meanwhile"
        self._titles = {"left": f"buckets written in place, {paused}", "right": "liveweight"}
        self._lock = threading.Lock()
        self._answers: dict[str, deque[Text]] = {side: deque(maxlen=ANSWERS_SHOWN) for side in self._titles}
        self._notes: dict[str, deque[str]] = {side: deque(maxlen=NOTES_SHOWN) for side in self._titles}
        self._counts = {side: TokenCounts() for side in self._titles}

    def note(self, side: Side | None, text: str) -> None:
        """See TornView."""
        with self._lock:
            for each in self._titles if side is None else (side,):
                self._notes[each].append(text)

    def judged(self, side: str, texts: Sequence[str], kinds: Sequence[Kind]) -> None:
        """See TornView."""
        line = Text(overflow="ellipsis", no_wrap=True)
        for text, kind in zip(texts, kinds, strict=True):
            line.append(text, STYLES[kind])
        with self._lock:
            self._answers[side].append(line)
            self._counts[side] += TokenCounts.of(kinds)

    def __rich__(self) -> RenderableType:
        """Draw the current state."""
        table = Table.grid(expand=True)
        for _ in self._titles:
            table.add_column(ratio=1)
        with self._lock:
            table.add_row(*(self._column(side) for side in self._titles))
        return table

    def _column(self, side: str) -> Panel:
        counts = self._counts[side]
        summary = Text.assemble(
            f"old {counts.old} · ",
            (f"new {counts.new}", STYLES["new"]),
            " · ",
            (f"neither {counts.neither}", STYLES["neither"] if counts.neither else ""),
            f" of {counts.total} tokens",
        )
        answers = [*self._answers[side], *[Text()] * (ANSWERS_SHOWN - len(self._answers[side]))]
        notes = [Text(note, "dim") for note in self._notes[side]]
        notes += [Text()] * (NOTES_SHOWN - len(notes))
        return Panel(Group(*answers, Text(), summary, Text(), *notes), title=self._titles[side])


@contextmanager
def viewing(settings: TornSettings, *, silent: bool) -> Iterator[TornView]:
    """Choose the view that fits the output."""
    console = Console()
    if silent:
        yield SilentView()
    elif not console.is_terminal:
        yield PlainView()
    else:
        view = TerminalView(settings)
        with Live(view, console=console, refresh_per_second=REFRESHES_PER_S):
            yield view
