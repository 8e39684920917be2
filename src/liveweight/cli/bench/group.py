"""`liveweight bench`: measurements on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from liveweight.cli.failures import reporting_errors

if TYPE_CHECKING:
    from liveweight.lab.bench.digest import DigestReport


def _writable(place: str | None) -> str | None:
    """Check this before anything is measured."""
    if place is not None and place != "-" and not Path(place).parent.is_dir():
        raise typer.BadParameter(f"{Path(place).parent} is not a directory")
    return place


JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json",
        callback=_writable,
        help="Write JSON to this file; '-' prints it in place of the table.",
    ),
]
app = typer.Typer(no_args_is_help=True)


@app.callback()
def options() -> None:
    """Measure on this machine.

    For example: liveweight bench digest
    """


@app.command()
@reporting_errors
def digest(
    size_mb: Annotated[int, typer.Option(min=1, help="MB of bfloat16; more than the caches hold.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the best counts.")] = 15,
    json_to: JsonTo = None,
) -> None:
    """What digesting costs beside copying: one core, warm.

    For example: liveweight bench digest --size-mb 512 --json digest.json
    """
    from liveweight.lab.bench.digest import bench_digest

    report = bench_digest(size_mb=size_mb, repeats=repeats)
    print_report(report.to_dict(), json_to, lambda: _show(report))


def print_report(report: dict[str, Any], json_to: str | None, show: Callable[[], None]) -> None:
    """Print JSON instead of a table if `json_to` is "-"; else print the table, and write JSON to that file, if any."""
    text = json.dumps(report, indent=2)
    if json_to == "-":
        print(text)
        return
    show()
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
@reporting_errors
def ipc(
    size_gb: Annotated[float, typer.Option(min=0.001, help="GB of bfloat16 weights.")] = 1.4,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the replica; each keeps its share.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every contender.")] = 8,
    tensors: Annotated[int, typer.Option(min=0, help="So many equal tensors, in place of a decoder's.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Staging threads of each rank.")] = 1,
    cast: Annotated[bool, typer.Option(help="Freeze from float32 too.")] = True,
    json_to: JsonTo = None,
) -> None:
    """Rounds over shared memory, beside one plain copy of the same bytes.

    For example: liveweight bench ipc --size-gb 0.5 --ranks 2
    """
    from liveweight.lab.bench.rounds.ipc import IpcSettings, bench_ipc

    settings = IpcSettings(
        size_gb=size_gb, ranks=ranks, rounds=rounds, tensors=tensors, threads=threads, cast=cast
    )
    report = bench_ipc(settings)
    print_report(report, json_to, lambda: _show_ipc(report))


def _show_ipc(report: dict[str, Any]) -> None:
    print(f"{report['bytes'] / 1e9:.2f} GB in {report['tensors']} tensors to {report['ranks']} ranks")
    print(f"limit: {report['limit_s'] * 1e3:.1f} ms (median {report['limit_median_s'] * 1e3:.1f})")
    for kind, figures in report["rounds"].items():
        for name, times in figures.items():
            what = f"{kind} {name.removesuffix('_s')}"
            best, median = times["best"] / report["limit_s"], times["median"] / report["limit_median_s"]
            print(
                f"{what:16}{times['best'] * 1e3:9.1f} ms{times['median'] * 1e3:9.1f} median"
                f"{best:7.2f} x limit{median:7.2f} by medians"
            )
    extra, ring = report["ring_peak_extra_bytes"], report["ring_bytes"]
    print(f"ring of {ring / 1e6:.1f} MB: {extra / 1e6:.1f} MB beside the trainer's weights at their peak")
    iterator = report["iterator"]
    print(
        f"from an iterator: {iterator['of_frozen']:.2f} x a frozen round, {iterator['median_of_frozen']:.2f} by medians; "
        f"{iterator['peak_extra_bytes'] / report['bytes']:.2f} x the weights beside them at their peak"
    )
    if "freeze_s" in report:
        print(f"freeze from float32: {report['freeze_ratio']:.2f} x a plain cast-copy")


@app.command()
@reporting_errors
def engine(
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint directory; without one, random weights.")
    ] = None,
    size: Annotated[Literal["tiny", "small", "1b"], typer.Option(help="Of the random weights.")] = "small",
    arch: Annotated[Literal["qwen3", "qwen3_moe"], typer.Option(help="Of the random weights.")] = "qwen3",
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the engine, one thread each.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per request.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of both.")] = 5,
    json_to: JsonTo = None,
) -> None:
    """The embedded engine beside transformers' generate, on the same model, prompts and cores.

    For example: liveweight bench engine --size tiny --prompts 8
    """
    from liveweight.lab.bench.engine.throughput import EngineSettings, bench_engine

    settings = EngineSettings(
        model=model, size=size, arch=arch, tp=tp, prompts=prompts, new_tokens=new_tokens, repeats=repeats
    )
    report = bench_engine(settings)
    print_report(report, json_to, lambda: _show_engine(report))


def _show_engine(report: dict[str, Any]) -> None:
    print(
        f"{report['model']}: {report['prompts']} prompts, {report['new_tokens']} tokens each, {report['cores']} cores"
    )
    for name, key in (("liveweight", "tokens_per_s"), ("transformers", "transformers_tokens_per_s")):
        print(f"{name:14}{report[key]:9.0f} tokens/s{report[f'median_{key}']:9.0f} median")
    print(f"ratio {report['ratio']:.2f}, of medians {report['median_ratio']:.2f}, wanted >= 1.5")
    print(f"{report['same_answers']} of {report['prompts']} answers are the same to the last token")


@app.command()
@reporting_errors
def live(
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint directory; without one, random weights.")
    ] = None,
    size: Annotated[Literal["tiny", "small", "1b"], typer.Option(help="Of the random weights.")] = "1b",
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the engine.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode all the time.")] = 8,
    commits: Annotated[int, typer.Option(min=1, help="Updates, for each KV policy.")] = 20,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 10.0,
    offer: Annotated[Literal["frozen", "live"], typer.Option(help="What the trainer offers.")] = "frozen",
    kv_policy: Annotated[
        Literal["reuse", "recompute", "both"], typer.Option(help="What a commit does to running requests.")
    ] = "both",
    json_to: JsonTo = None,
) -> None:
    """What live updates cost an engine that serves: stall, goodput, gaps between tokens.

    For example: liveweight bench live --size small --commits 5 --every-s 2 --kv-policy reuse
    """
    from liveweight.lab.bench.engine.live import LiveSettings, bench_live

    settings = LiveSettings(
        model=model,
        size=size,
        tp=tp,
        requests=requests,
        commits=commits,
        every_s=every_s,
        offer=offer,
        policies=("reuse", "recompute") if kv_policy == "both" else (kv_policy,),
    )
    report = bench_live(settings)
    print_report(report, json_to, lambda: _show_live(report))


def _show_live(report: dict[str, Any]) -> None:
    print(
        f"{report['model']}, {report['bytes'] / 1e9:.2f} GB, tp {report['tp']}, {report['requests']} requests, "
        f"an update every {report['every_s']:g} s; one plain copy of the weights: {report['copy_s'] * 1e3:.0f} ms"
    )
    for policy, found in ((p, report[p]) for p in ("reuse", "recompute") if p in report):
        print(
            f"{policy:10} stall {found['stall_s'] * 1e3:8.1f} ms, {found['stall_ratio']:.3f} of a copy; "
            f"goodput {found['goodput']:.3f}; p99 gap {found['gap_p99_ratio']:.2f} of that without updates"
        )


@app.command()
@reporting_errors
def snapshot(
    size_gb: Annotated[float, typer.Option(min=0.001, help="GB of bfloat16 weights.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every contender.")] = 5,
    part_mb: Annotated[int, typer.Option(min=1, help="How large parts become, in MB.")] = 256,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write; by default the system's temporary directory.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Saving and restoring snapshots, beside safetensors with the same bytes.

    For example: liveweight bench snapshot --size-gb 4 --directory /tmp
    """
    from liveweight.lab.bench.snapshot import SnapshotSettings, bench_snapshot

    settings = SnapshotSettings(size_gb=size_gb, rounds=rounds, part_bytes=part_mb << 20, directory=directory)
    report = bench_snapshot(settings)
    print_report(report, json_to, lambda: _show_snapshot(report))


def _show_snapshot(report: dict[str, Any]) -> None:
    print(f"{report['bytes'] / 1e9:.2f} GB in {report['tensors']} tensors, {report['parts']} parts")
    rows = {
        "save": "save_s",
        "save_file, fsync": "save_file_s",
        "restore": "restore_s",
        "load_file": "load_s",
    }
    for name, key in rows.items():
        print(f"{name:18}{report[key]['best'] * 1e3:9.1f} ms{report[key]['median'] * 1e3:9.1f} median")
    print(f"save_ratio     {report['save_ratio']:5.2f}   wanted <= 1.3")
    print(f"restore_ratio  {report['restore_ratio']:5.2f}   wanted <= 1.2")
    peak, limit = report["peak_extra_bytes"] / 1e6, report["part_bytes"] * 1.1 / 1e6
    print(f"peak_extra_bytes {peak:.1f} MB, wanted <= {limit:.1f}: one part and a tenth")


@app.command()
@reporting_errors
def nixl(
    size_gb: Annotated[float, typer.Option(min=0.001, help="GB of bfloat16 weights.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every contender.")] = 8,
    json_to: JsonTo = None,
) -> None:
    """One-sided reads (`gdr`), staged and verified, beside a bare NIXL READ of the same bytes.

    For example: liveweight bench nixl --size-gb 1.4 --json nixl.json
    """
    from liveweight.lab.bench.nixl import NixlSettings, bench_nixl

    report = bench_nixl(NixlSettings(size_gb=size_gb, rounds=rounds))
    print_report(report, json_to, lambda: _show_nixl(report))


def _show_nixl(report: dict[str, Any]) -> None:
    print(f"{report['bytes'] / 1e9:.2f} GB, {report['cores']} cores")
    rows = {
        "bare READ": "bare",
        "staged": "plain",
        "staged and verified": "verified",
        "two ranks, half each": "halves",
    }
    for name, key in rows.items():
        times = report[f"{key}_s"]
        print(
            f"{name:22}{times['best'] * 1e3:9.1f} ms{times['median'] * 1e3:9.1f} median{report['rates_gb_s'][key]:7.2f} GB/s"
        )
    print(f"plain_ratio     {report['plain_ratio']:5.2f}   wanted >= 0.9")
    print(f"verified_ratio  {report['verified_ratio']:5.2f}   wanted >= 0.8")
    print(f"two_rank_ratio  {report['two_rank_ratio']:5.2f}   wanted <= 1.1")
