"""The report's charts: reward, rounds per rank, stalls, logprob gap. Pure: from records to SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from liveweight.lab.demo.records import DemoRound, ReplicaPart, TrainingStep
from liveweight.lab.demo.report.scale import BOTTOM, LEFT, TOP, Scale, across, upward
from liveweight.lab.demo.report.svg import axes, box, chart, curve, tag, text, time_axis

BINS = 16
ROW = 22
LEAST_GAP = 1e-8
Span: TypeAlias = tuple[str, float, float]
"""A name, where it begins, how long it takes."""


def reward(steps: Sequence[TrainingStep]) -> str:
    """The reward of both runs by step, and the steps with faults."""
    runs = {run: [step for step in steps if step.run == run] for run in ("live", "control")}
    x, y = across(1, max(2, *(step.step for step in steps))), upward(0, 1)
    parts = [axes(x, y, "training step", "reward")]
    for fault in (fault for step in steps for fault in step.faults):
        at, about = x(fault.step), tag("title", f"{fault.kind}, step {fault.step}")
        parts.append(tag("line", about, x1=at, x2=at, y1=TOP, y2=y(0), class_="fault", data_kind=fault.kind))
    for run, own in runs.items():
        if own:
            points = [(x(step.step), y(step.reward)) for step in own]
            parts.append(curve(f"reward-{run}", points, [step.reward for step in own], run))
            parts.append(_label(run, points))
    said = ", ".join(
        f"{run} from {own[0].reward:.2f} to {own[-1].reward:.2f}" for run, own in runs.items() if own
    )
    return chart("reward", "Reward by training step", said, parts)


def stalls(rounds: Sequence[DemoRound]) -> str:
    """A histogram of decoding pauses at commits."""
    found = [part.stall_ms for one in rounds if one.problem is None for part in one.replicas]
    width = max([*found, 0.1]) / BINS
    counts = [0] * BINS
    for stall in found:
        counts[min(BINS - 1, int(stall / width))] += 1
    x, y = across(0, BINS * width), upward(0, max(1, *counts))
    parts = [axes(x, y, "decoding stood still, in ms", "commits")]
    for number, count in enumerate(counts):
        begin, end = x(number * width), x((number + 1) * width)
        about = f"{count} between {number * width:.2f} and {(number + 1) * width:.2f} ms"
        height = round(y(0) - y(count), 2)
        parts.append(box(begin + 1, y(count), end - begin - 2, height, about, class_="bar", data_count=count))
    return chart(
        "stalls",
        "Stall at a commit",
        f"{len(found)} commits, at most {max(found, default=0.0):.1f} ms",
        parts,
    )


def gaps(steps: Sequence[TrainingStep]) -> str:
    """The worst difference between the engine's logprobs and the trainer's, by step."""
    live = [step for step in steps if step.run == "live"]
    series = {
        "all": [(step.step, step.gap.worst) for step in live if step.gap.tokens],
        "after": [(step.step, step.gap.after_worst) for step in live if step.gap.after_tokens],
    }
    worst = max([value for found in series.values() for _, value in found] or [LEAST_GAP])
    x = across(1, max(2, *(step.step for step in live)))
    y = upward(LEAST_GAP, max(1.0, worst), log=True)
    parts = [axes(x, y, "training step", "largest difference")]
    for name, found in series.items():
        points = [(x(step), y(max(value, LEAST_GAP))) for step, value in found]
        parts.append(curve(f"gap-{name}", points, [value for _, value in found], name))
    return chart("gaps", "Logprobs of engine and trainer", f"at most {worst:.2g}", parts)


def timeline(rounds: Sequence[DemoRound]) -> str:
    """All rounds of the run, a row per rank; failed rounds are drawn over all rows."""
    rows = sorted({name for one in rounds for part in one.replicas for name in _names(part)})
    height = TOP + ROW * max(1, len(rows)) + BOTTOM
    begin = min((one.began_s for one in rounds), default=0.0)
    x = across(0, max([one.began_s - begin + one.total_ms / 1e3 for one in rounds] or [1.0]))
    parts = [_rows(rows, x, height, "seconds")]
    for one in rounds:
        at, end = x(one.began_s - begin), x(one.began_s - begin + one.total_ms / 1e3)
        if one.problem is not None:
            size = ROW * len(rows) - 6
            parts.append(
                box(at, TOP + 3, end - at, size, one.problem, class_="failed", data_version=one.version)
            )
            continue
        for part in one.replicas:
            for name, rank in zip(_names(part), part.ranks, strict=True):
                about = f"version {one.version}: {one.total_ms:.1f} ms, {rank.staged_bytes} bytes"
                top = TOP + ROW * rows.index(name) + 3
                parts.append(box(at, top, end - at, ROW - 6, about, class_="round", data_version=one.version))
    return chart("timeline", "Rounds by rank", f"{len(rounds)} rounds", parts, height=height)


def one_round(one: DemoRound) -> str:
    """A single round in its steps: as the publisher waited for them, and as each rank measured them."""
    rows = [row for part in one.replicas for row in (str(part.replica), *_names(part))]
    height = TOP + ROW * max(1, len(rows)) + BOTTOM
    x = across(0, max(one.total_ms, 0.001))
    parts = [_rows(rows, x, height, "milliseconds")]
    for part in one.replicas:
        spans = {str(part.replica): _waits(one, part), **_works(one, part)}
        for row, found in spans.items():
            top = TOP + ROW * rows.index(row) + 3
            for name, at, took in found:
                about, ms = f"{name}: {took:.2f} ms", f"{took:.3f}"
                parts.append(box(x(at), top, x(at + took) - x(at), ROW - 6, about, class_=name, data_ms=ms))
    return chart(
        "round", f"Version {one.version}, step by step", f"{one.total_ms:.1f} ms", parts, height=height
    )


def _waits(one: DemoRound, part: ReplicaPart) -> list[Span]:
    """The steps that the publisher waited for, one after the other."""
    spans: list[Span] = [("freeze", 0.0, one.freeze_ms)]
    before = 0.0
    for name, until in part.reached_ms:
        spans.append((name, one.freeze_ms + before, until - before))
        before = until
    return spans


def _works(one: DemoRound, part: ReplicaPart) -> dict[str, list[Span]]:
    """What each rank did, by its own clock, placed where the publisher received the result."""
    reached = dict(part.reached_ms)
    begin = one.freeze_ms + reached.get("open", 0.0)
    end = one.freeze_ms + reached.get("commit", one.total_ms)
    return {
        name: [
            ("stage", begin, rank.stage_ms),
            ("verify", begin + rank.stage_ms, rank.verify_ms),
            ("commit", end - rank.swap_ms, rank.swap_ms),
        ]
        for name, rank in zip(_names(part), part.ranks, strict=True)
    }


def _names(part: ReplicaPart) -> list[str]:
    return [f"{part.replica} / {rank.rank}" for rank in part.ranks]


def _label(run: str, points: Sequence[tuple[float, float]]) -> str:
    """A curve's name, above it, where it leaves room."""
    at = len(points) // 2
    top = min(y for _, y in points[max(0, at - 4) : at + 5])
    return text(run, points[at][0], top - 8, class_=f"label {run}")


def _rows(rows: Sequence[str], x: Scale, height: float, unit: str) -> str:
    """Rows with their names, and a time axis below."""
    names = [
        text(name, LEFT - 8, TOP + ROW * number + ROW / 2 + 4, "end") for number, name in enumerate(rows)
    ]
    return time_axis(x, unit, height) + "".join(names)
