"""`liveweight bench peers`: our rounds beside what a user would pick instead."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from liveweight.cli.bench.group import JsonTo, app, print_report
from liveweight.cli.failures import reporting_errors


@app.command()
@reporting_errors
def peers(
    size_gb: Annotated[float, typer.Option(min=0.001, help="GB of bfloat16 weights.")] = 1.4,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; each keeps its share.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every contender.")] = 5,
    json_to: JsonTo = None,
) -> None:
    """Our rounds beside broadcasts, files, queues, Ray and bucketed transfers of the same tensors, each checked bit for bit.

    For example: liveweight bench peers --size-gb 1.4 --ranks 2 --json peers.json
    """
    from liveweight.lab.bench.peers.peers import PeersSettings, bench_peers

    report = bench_peers(PeersSettings(size_gb=size_gb, ranks=ranks, rounds=rounds))
    print_report(report, json_to, lambda: _show(report))


def _show(report: dict[str, Any]) -> None:
    print(f"{report['bytes'] / 1e9:.2f} GB in {report['tensors']} tensors to {report['ranks']} ranks")
    print(f"one plain copy by the ranks: {report['limit_s'] * 1e3:.1f} ms")
    for name, row in sorted(report["contenders"].items(), key=lambda item: item[1]["best_s"]):
        times = f"{row['best_s'] * 1e3:9.1f} ms{row['median_s'] * 1e3:9.1f} median"
        print(f"{name:24}{times}{row['best_s'] / report['limit_s']:7.2f} x limit   {row['stands_for']}")
    for name, why in report["absent"].items():
        print(f"{name:24}   absent, {why}")
    rows = {
        "of_in_place": "ipc live plain / those that share memory in place, wanted <= 1.1",
        "over_copies_twice": "those that copy twice / ipc live plain, wanted >= 1.5",
        "verified_of_copies_twice": "ipc live verified / those that copy twice, wanted <= 1.4",
        "speedup_best": "the best of gloo, files and Ray / ipc live plain, wanted >= 2",
        "speedup_median": "the middle one of them / ipc live plain, wanted >= 4",
    }
    for name, text in rows.items():
        print(f"{name:24}{report[name]:6.2f}   {text}")
