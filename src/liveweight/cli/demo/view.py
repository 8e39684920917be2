"""What a demo prints while it runs: JSON lines, plain lines, or, on a terminal, a live picture. All of them read records."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from liveweight.lab.demo.records import Phase, Record, Summary, TrainingStep, Warmed

if TYPE_CHECKING:
    from liveweight.lab.demo.records import Listener
    from liveweight.lab.demo.settings import DemoSettings

TITLES = {
    "start": "starting the engines",
    "warmup": "warm-up",
    "live": "live run",
    "control": "control run",
    "end": "done",
}


@contextmanager
def viewing(settings: DemoSettings, *, as_json: bool) -> Iterator[Listener]:
    """Choose the view: JSON with --json, a picture on a terminal, lines otherwise."""
    if as_json:
        yield print_json
    elif sys.stdout.isatty():
        from liveweight.cli.demo.terminal_picture import TerminalPicture

        with TerminalPicture(settings) as picture:
            yield picture.on_record
    else:
        yield print_line


def print_json(record: Record) -> None:
    """Print an object per step; the last one is the summary."""
    if isinstance(record, TrainingStep | Summary):
        print(json.dumps(asdict(record)), flush=True)


def print_line(record: Record) -> None:
    """Print a line per step, and the summary."""
    match record:
        case Phase(name=name, detail=detail):
            print(f"{TITLES[name]}{f': {detail}' if detail else ''}", flush=True)
        case Warmed(step=step, steps=steps, loss=loss) if step == steps:
            print(f"warm-up: {steps} steps, loss {loss:.2f}", flush=True)
        case TrainingStep():
            print(step_line(record), flush=True)
            for fault in record.faults:
                print(f"  survived: {fault.what}; back after {fault.recovered_ms / 1e3:.1f} s", flush=True)
        case Summary():
            print("\n".join(summary_lines(record)), flush=True)
        case _:
            return


def step_line(step: TrainingStep) -> str:
    """A step in one line."""
    stalls = [one.stall_ms for one in step.rounds if one.problem is None]
    stall = f"stall {max(stalls):5.1f} ms" if stalls else "stall     -   "
    return (
        f"{step.run:7} {step.step:4}  reward {step.reward:.2f}  staleness {step.staleness_mean:.1f}  "
        f"{step.crossed:3} crossed  {stall}  {step.tokens_per_s:5.0f} tokens/s  gap {step.gap.worst:.0e}"
    )


def summary_lines(summary: Summary) -> list[str]:
    """The demo's result as text."""
    lines = [
        f"reward     {summary.reward_first:.2f} -> {summary.reward_last:.2f}, every step published",
        f"rounds     {summary.rounds} committed, {summary.crossed} answers crossed a commit",
        f"stall      {summary.stall_ms_p50:.1f} ms in the median, {summary.stall_ms_p99:.1f} ms at p99",
        f"on-policy  logprobs differ by {summary.gap_worst:.1e} at most, "
        f"{summary.gap_after_worst:.1e} after a commit ({summary.kv_policy})",
        f"faults     {summary.faults_survived} survived, {summary.rounds_failed} rounds failed and were tried again",
        f"took       {summary.took_s:.0f} s",
    ]
    if summary.control_reward_first is not None and summary.control_reward_last is not None:
        control = f"control    {summary.control_reward_first:.2f} -> {summary.control_reward_last:.2f}"
        lines.insert(1, f"{control}, nothing published after the warm-up")
    return lines
