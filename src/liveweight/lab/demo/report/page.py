"""The report as a page: figures, charts and faults in one HTML file that needs nothing else."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path

from liveweight.errors import Refused
from liveweight.lab.demo.demo import DemoOutcome
from liveweight.lab.demo.records import DemoFault, DemoRound, Summary
from liveweight.lab.demo.report import charts
from liveweight.lab.demo.report.svg import tag
from liveweight.lab.demo.settings import DemoSettings

NAME = "index.html"
FIGURES = {
    "reward_first": ("reward after the warm-up", "{:.2f}"),
    "reward_last": ("reward at the end", "{:.2f}"),
    "control_reward_last": ("at the end without publishing", "{:.2f}"),
    "rounds": ("versions committed", "{}"),
    "crossed": ("answers that crossed a commit", "{}"),
    "stall_ms_p50": ("stall, median", "{:.1f} ms"),
    "stall_ms_p99": ("stall, p99", "{:.1f} ms"),
    "staleness_worst": ("versions behind, at most", "{}"),
    "gap_worst": ("logprob gap, largest", "{:.1e}"),
    "faults_survived": ("faults survived", "{}"),
}
"""The figures at the top of the page, by name in the summary: caption and format."""


def write_report(directory: Path, outcome: DemoOutcome, settings: DemoSettings) -> Path:
    """Write the page, and create its directory. Refused if it cannot be written."""
    path = directory / NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(page(outcome, settings), encoding="utf-8")
    except OSError as error:
        raise Refused(f"the report cannot be written to {path}: {error.strerror or error}") from error
    return path


def page(outcome: DemoOutcome, settings: DemoSettings) -> str:
    """The page's text."""
    rounds = [one for step in outcome.steps for one in step.rounds]
    faults = [fault for step in outcome.steps for fault in step.faults]
    template = string.Template((files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        told=escape(_describe(settings)),
        figures="".join(_figure(name, outcome.summary) for name in FIGURES),
        reward=charts.reward(outcome.steps),
        timeline=charts.timeline(rounds),
        one_round=charts.one_round(_typical(rounds)),
        stalls=charts.stalls(rounds),
        gaps=charts.gaps(outcome.steps),
        faults=_faults(faults),
        kv_policy=escape(settings.kv_policy),
        summary=json.dumps(asdict(outcome.summary)).replace("<", "\\u003c"),
    )


def _describe(settings: DemoSettings) -> str:
    chaos = ", chaos" if settings.chaos else ""
    return (
        f"{settings.engines}, transfer mode {settings.mode}, KV policy {settings.kv_policy}, "
        f"staleness at most {settings.staleness}, seed {settings.seed}{chaos}"
    )


def _figure(name: str, summary: Summary) -> str:
    value = asdict(summary)[name]
    called, form = FIGURES[name]
    shown = "not run" if value is None else form.format(value)
    number = tag("dd", escape(shown), data_figure=name, data_value="" if value is None else repr(value))
    return tag("div", tag("dt", escape(called)) + number)


def _typical(rounds: Sequence[DemoRound]) -> DemoRound:
    """The committed round that took the median time."""
    done = sorted((one for one in rounds if one.problem is None), key=lambda one: one.total_ms)
    return done[len(done) // 2]


def _faults(faults: Sequence[DemoFault]) -> str:
    if not faults:
        return tag("p", "None: nothing was broken in this run.", id="faults", data_count=0)
    head = "".join(tag("th", name, scope="col") for name in ("step", "what", "the round said", "whole again"))
    rows = "".join(
        tag(
            "tr",
            tag("td", str(fault.step))
            + tag("td", escape(fault.what))
            + tag("td", escape(fault.said))
            + tag("td", f"after {fault.recovered_ms / 1e3:.1f} s"),
            data_kind=fault.kind,
        )
        for fault in faults
    )
    table = tag(
        "table", tag("thead", tag("tr", head)) + tag("tbody", rows), id="faults", data_count=len(faults)
    )
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="faults survived")
