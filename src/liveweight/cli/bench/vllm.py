"""`liveweight bench vllm`: what an update costs a vLLM that serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from liveweight.cli.bench.group import JsonTo, print_report


def vllm(
    python: Annotated[
        Path, typer.Option(help="The Python of vLLM's environment, which has liveweight, too.")
    ],
    updates: Annotated[
        int, typer.Option(min=1, help="How often every contender takes its turn, after a first one.")
    ] = 3,
    clients: Annotated[int, typer.Option(min=1, help="How many stream all the time.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, max=1000, help="Tokens of an answer.")] = 16,
    json_to: JsonTo = None,
) -> None:
    """The pause and the time of an update of vLLM, beside its own reload from files and a plain backend.

    For example: liveweight bench vllm --python .venv-vllm/0.32.0/bin/python
    """
    from liveweight.lab.bench.vllm.vllm import VllmSettings, bench_vllm

    python.stat()  # fail here if it does not exist, before a model is made
    settings = VllmSettings(
        python=python.absolute(),
        environment=dict(os.environ),
        updates=updates,
        clients=clients,
        tokens=tokens,
    )
    report = bench_vllm(settings)
    print_report(report, json_to, lambda: _show(report))


def _show(report: dict[str, Any]) -> None:
    print(
        f"{report['bytes'] / 1e9:.2f} GB, {report['clients']} clients, {report['usual_gap_s'] * 1e3:.0f} ms between tokens"
    )
    for what, figures in (("best", report), ("median", report["by_median"])):
        for name in ("ours", "reload", "plain"):
            found = figures[name]
            print(
                f"{what:6} {name:15} pause {found['pause_s'] * 1e3:6.0f} ms   total {found['total_s'] * 1e3:6.0f} ms"
            )
        for name in ("reload", "plain"):
            pause, total = figures["pause_ratio"][name], figures["total_ratio"][name]
            print(f"{what:6} {f'ours / {name}':15} pause {pause:6.2f}      total {total:6.2f}")
