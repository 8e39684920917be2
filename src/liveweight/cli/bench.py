"""`liveweight bench`: measurements on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from liveweight.bench.digest import DigestReport

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Measure on this machine."""


@app.command()
def digest(
    size_mb: Annotated[int, typer.Option(min=1, help="MB of bfloat16; more than the caches hold.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the best counts.")] = 15,
    json_to: Annotated[
        str | None,
        typer.Option("--json", help="Write JSON to this file; '-' prints it in place of the table."),
    ] = None,
) -> None:
    """What digesting costs beside copying: one core, warm."""
    from liveweight.bench.digest import bench_digest

    report = bench_digest(size_mb=size_mb, repeats=repeats)
    text = json.dumps(report.to_dict(), indent=2)
    if json_to == "-":
        print(text)
        return
    _show(report)
    if json_to is not None:
        Path(json_to).write_text(text + "\n", encoding="utf-8")


def _show(report: DigestReport) -> None:
    print(f"{report.kernels} kernels, {report.size_mb} MB, one of {report.cores} cores, {report.machine}")
    print(f"{'':16}{'best GB/s':>10}{'median':>10}{'best ms':>10}{'median':>10}")
    for name, timing in report.timings.items():
        rates = f"{timing.best_gb_s:10.2f}{timing.median_gb_s:10.2f}"
        print(f"{name:16}{rates}{timing.best_s * 1e3:10.2f}{timing.median_s * 1e3:10.2f}")
    print(f"c_ratio      {report.c_ratio:5.2f}   digest's rate / memmove's, wanted >= 0.8")
    print(f"fused_ratio  {report.fused_ratio:5.2f}   copy + digest / memmove, wanted <= 1.4")
    own = f"{report.own_c_ratio:.2f} and {report.own_fused_ratio:.2f}"
    print(f"             beside our own copy, which streams past the caches: {own}")
    print(f"cast_ratio   {report.cast_ratio:5.2f}   cast + copy + digest / cast + copy, wanted <= 1.3")


@app.command()
def ipc(
    size_gb: Annotated[float, typer.Option(min=0.001, help="GB of bfloat16 weights.")] = 1.4,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the replica; each keeps its share.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every contender.")] = 6,
    tensors: Annotated[int, typer.Option(min=0, help="So many equal tensors, in place of a decoder's.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Staging threads of each rank.")] = 1,
    cast: Annotated[bool, typer.Option(help="Freeze from float32 too.")] = True,
    json_to: Annotated[
        str | None,
        typer.Option("--json", help="Write JSON to this file; '-' prints it in place of the table."),
    ] = None,
) -> None:
    """Rounds over shared memory, beside one plain copy of the same bytes."""
    from liveweight.bench.ipc import IpcSettings, bench_ipc

    settings = IpcSettings(
        size_gb=size_gb, ranks=ranks, rounds=rounds, tensors=tensors, threads=threads, cast=cast
    )
    report = bench_ipc(settings)
    text = json.dumps(report, indent=2)
    if json_to == "-":
        print(text)
        return
    _show_ipc(report)
    if json_to is not None:
        Path(json_to).write_text(text + "\n", encoding="utf-8")


def _show_ipc(report: dict[str, Any]) -> None:
    print(f"{report['bytes'] / 1e9:.2f} GB in {report['tensors']} tensors to {report['ranks']} ranks")
    print(f"limit: {report['limit_s'] * 1e3:.1f} ms (median {report['limit_median_s'] * 1e3:.1f})")
    for kind, figures in report["rounds"].items():
        for name, times in figures.items():
            what = f"{kind} {name.removesuffix('_s')}"
            of_limit = times["best"] / report["limit_s"]
            print(
                f"{what:16}{times['best'] * 1e3:9.1f} ms{times['median'] * 1e3:9.1f} median{of_limit:7.2f} x limit"
            )
    if "freeze_s" in report:
        print(f"freeze from float32: {report['freeze_ratio']:.2f} x a plain cast-copy")
