"""`liveweight bench growth`: how rounds grow with bytes, tensors, ranks and replicas."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from liveweight.cli.bench.group import JsonTo, app, print_report
from liveweight.cli.failures import reporting_errors


@app.command()
@reporting_errors
def growth(
    largest_gb: Annotated[float, typer.Option(min=0.002, help="The largest size; halved four times.")] = 4.0,
    base_gb: Annotated[float, typer.Option(min=0.001, help="The size on the other axes.")] = 0.5,
    most_tensors: Annotated[
        int, typer.Option(min=100, help="The most tensors; a tenth, a hundredth.")
    ] = 40_000,
    most: Annotated[int, typer.Option(min=1, help="The most ranks, and the most replicas.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every point.")] = 5,
    json_to: JsonTo = None,
) -> None:
    """Live rounds over shared memory at growing sizes, with a fitted exponent for each axis.

    For example: liveweight bench growth --largest-gb 4 --json growth.json
    """
    from liveweight.lab.bench.rounds.growth import GrowthSettings, bench_growth

    counts = tuple(count for count in (1, 2, 4, 8) if count <= most)
    report = bench_growth(
        GrowthSettings(
            sizes_gb=tuple(largest_gb / 2**halvings for halvings in range(4, -1, -1)),
            tensors=(most_tensors // 100, most_tensors // 10, most_tensors),
            ranks=counts,
            replicas=counts,
            base_gb=base_gb,
            rounds=rounds,
        )
    )
    print_report(report, json_to, lambda: _show(report))


def _show(report: dict[str, Any]) -> None:
    for axis, points in report["axes"].items():
        slopes = report["exponents"][axis]
        print(
            f"{axis}: plain grows as its power {slopes['plain_s']:.2f}, one plain copy as {slopes['limit_s']:.2f}"
        )
        for point in points:
            times = f"{point['plain_s'] * 1e3:9.1f} ms plain{point['verified_s'] * 1e3:9.1f} verified"
            print(f"{point['at']:10g}{times}{point['limit_s'] * 1e3:9.1f} limit")
    print(
        f"size_ratio             {report['size_ratio']:5.2f}   time per byte, largest / 0.5 GB, wanted <= 1.15"
    )
    for name in ("tensors_ratio", "tensors_verified_ratio"):
        print(f"{name:23}{report[name]:5.2f}   time per byte, most tensors / fewest, wanted <= 2")
