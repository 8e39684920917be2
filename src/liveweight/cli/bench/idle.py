"""`liveweight bench idle`: what live updates cost while nobody updates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from liveweight.cli.bench.group import JsonTo, app, print_report
from liveweight.cli.failures import reporting_errors


@app.command()
@reporting_errors
def idle(
    size: Annotated[Literal["tiny", "small", "1b"], typer.Option(help="Of the random weights.")] = "small",
    tp: Annotated[int, typer.Option(min=2, help="Ranks of each engine.")] = 2,
    turns: Annotated[int, typer.Option(min=2, help="Pairs of turns, with and without live updates.")] = 300,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a turn.")] = 16,
    json_to: JsonTo = None,
) -> None:
    """The time of a decode step with live updates enabled, beside engines that broadcast, or also wait, in every step.

    For example: liveweight bench idle --size small --turns 300 --json idle.json
    """
    from liveweight.lab.bench.engine.idle import IdleSettings, bench_idle

    report = bench_idle(IdleSettings(size=size, tp=tp, turns=turns, steps=steps))
    print_report(report, json_to, lambda: _show(report))


def _show(report: dict[str, Any]) -> None:
    print(f"{report['model']}, tp {report['tp']}, {report['cores']} cores, {report['turns']} turns")
    for name, step_s in report["step_s"].items():
        found = report.get(name)
        cost = (
            ""
            if found is None
            else f"{found['difference']:+8.2%} of a step, 95%: {found['low']:+.2%} to {found['high']:+.2%}"
        )
        print(f"{name:10}{step_s * 1e3:9.3f} ms a step  {cost}")
    print(f"extra collectives of live updates: {report['extra_collectives']:g} a step, wanted 0")
