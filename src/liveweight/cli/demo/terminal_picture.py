"""The demo on a terminal: reward, version, staleness, bytes, the steps of the last round as bars, stall beside the token rate.

Rich's own thread redraws it from the latest records; `on_record` never waits for a redraw.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from liveweight.cli.demo.view import TITLES, summary_lines
from liveweight.lab.demo.records import (
    STAGES,
    Phase,
    Record,
    Stage,
    StepReached,
    Summary,
    TrainingStep,
    Warmed,
)

if TYPE_CHECKING:
    from liveweight.lab.demo.settings import DemoSettings

LEVELS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
BAR = 24
COLOURS: dict[Stage, str] = {
    "open": "cyan",
    "stage": "blue",
    "verify": "magenta",
    "vote": "yellow",
    "commit": "green",
}


class TerminalPicture:
    """The live picture, for the length of a `with`. `on_record` is for any thread."""

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._phase = Phase(at_s=0.0, name="start")
        self._warmed: Warmed | None = None
        self._steps: list[TrainingStep] = []
        self._reached: dict[tuple[int, Stage], float] = {}
        self._summary: Summary | None = None
        self._live = Live(get_renderable=self.draw, refresh_per_second=8)

    def on_record(self, record: Record) -> None:
        """Keep the record for the next redraw."""
        with self._lock:
            match record:
                case Phase():
                    self._phase = record
                case Warmed():
                    self._warmed = record
                case TrainingStep():
                    self._steps.append(record)
                case StepReached():
                    if record.stage == "open":
                        self._reached = {k: v for k, v in self._reached.items() if k[0] != record.replica}
                    self._reached[record.replica, record.stage] = record.took_ms
                case Summary():
                    self._summary = record

    def draw(self) -> RenderableType:
        """Draw the current state."""
        with self._lock:
            steps, reached = list(self._steps), dict(self._reached)
            phase, warmed, summary = self._phase, self._warmed, self._summary
        title = Text.assemble((TITLES[phase.name], "bold"), f"  {phase.detail}")
        parts: list[RenderableType] = [title]
        if warmed is not None and phase.name == "warmup":
            parts.append(Text(f"step {warmed.step}/{warmed.steps}, loss {warmed.loss:.2f}"))
        parts.append(_curve("live", steps, "green"))
        if self._settings.control:
            parts.append(_curve("control", steps, "red"))
        if steps:
            parts.append(_figures(steps[-1], steps))
        parts += [_bars(replica, reached) for replica in sorted({key[0] for key in reached})]
        parts += [Text(f"survived: {fault.what}", "yellow") for s in steps for fault in s.faults][-3:]
        if summary is not None:
            parts += [Text(line) for line in summary_lines(summary)]
        return Panel(Group(*parts), title="liveweight demo", border_style="dim")

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw values between 0 and 1 as `width` blocks, each the mean of equally many values."""
    if not values:
        return ""
    size = -(-len(values) // width)
    chunks = [values[at : at + size] for at in range(0, len(values), size)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    return "".join(LEVELS[round(min(1.0, max(0.0, mean)) * (len(LEVELS) - 1))] for mean in means)


def _curve(run: str, steps: Sequence[TrainingStep], colour: str) -> Text:
    rewards = [step.reward for step in steps if step.run == run]
    last = f"{rewards[-1]:.2f}" if rewards else "   -"
    return Text.assemble(f"{run:8}reward ", (last, f"bold {colour}"), " ", (sparkline(rewards), colour))


def _figures(step: TrainingStep, steps: Sequence[TrainingStep]) -> Table:
    rounds = [one for s in steps for one in s.rounds if one.problem is None]
    table = Table.grid(padding=(0, 3))
    stall = f"{rounds[-1].stall_ms:.1f} ms" if rounds else "-"
    size = f"{sum(one.staged_bytes for one in rounds) / 1e6:.1f} MB"
    table.add_row(
        f"step [b]{step.step}[/b]",
        f"staleness [b]{step.staleness_mean:.1f}[/b] (worst {step.staleness_worst})",
        f"published [b]{size}[/b] in {len(rounds)} rounds",
    )
    table.add_row(
        f"version [b]{step.version if step.run == 'live' else 0}[/b]",
        f"stall [b]{stall}[/b] at [b]{step.tokens_per_s:.0f}[/b] tokens/s",
        f"crossed a commit [b]{step.crossed}[/b]/{step.samples}, logprob gap [b]{step.gap.worst:.0e}[/b]",
    )
    return table


def _bars(replica: int, reached: dict[tuple[int, Stage], float]) -> Table:
    """The steps of a replica's last round, each as long as it took."""
    times = [(stage, reached[replica, stage]) for stage in STAGES if (replica, stage) in reached]
    whole, before = max(1e-6, max(ms for _, ms in times)), 0.0
    table = Table.grid(padding=(0, 1))
    for stage, until in times:
        length = max(1, round((until - before) / whole * BAR))
        place = round(before / whole * BAR)
        bar = Text(" " * place + "━" * length, COLOURS[stage])
        table.add_row(f"replica {replica}" if stage == "open" else "", stage, bar, f"{until - before:.1f} ms")
        before = until
    return table
