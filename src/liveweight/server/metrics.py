"""The engine's metrics: a table of what is counted, read from its status at every scrape.

Owns names and labels, in the manner of observe/metrics.py. Nothing is counted here: the engine counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from liveweight.engine.status import Status
from liveweight.server.engine_port import EnginePort

REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetric:
    """A row of the table; the page of the API is checked against it. `read` gives a value per label, or one under the empty one."""

    name: str
    kind: Literal["counter", "gauge"]
    label: str | None = None
    meaning: str
    read: Callable[[Status], Mapping[str, float]]


def _one(read: Callable[[Status], float]) -> Callable[[Status], Mapping[str, float]]:
    return lambda status: {"": read(status)}


def _counter(name: str, meaning: str, read: Callable[[Status], float]) -> EngineMetric:
    return EngineMetric(
        name=f"liveweight_engine_{name}_total", kind="counter", meaning=meaning, read=_one(read)
    )


ENGINE_METRICS = (
    EngineMetric(
        name="liveweight_engine_up",
        kind="gauge",
        meaning="1 while the engine takes requests, 0 when it is stopping or failed",
        read=_one(lambda status: float(status.state == "running")),
    ),
    EngineMetric(
        name="liveweight_engine_requests",
        kind="gauge",
        label="state",
        meaning="requests that are running or waiting now",
        read=lambda status: {"running": status.running, "waiting": status.waiting},
    ),
    EngineMetric(
        name="liveweight_engine_kv_blocks",
        kind="gauge",
        label="state",
        meaning="pages of the KV cache that are free or used now; free ones may hold prefixes",
        read=lambda status: {
            "free": status.blocks_free,
            "used": status.blocks_total - status.blocks_free,
        },
    ),
    EngineMetric(
        name="liveweight_engine_requests_finished_total",
        kind="counter",
        label="reason",
        meaning="requests that ended, by reason",
        read=lambda status: {reason: status.counts.finished.get(reason, 0) for reason in REASONS},
    ),
    _counter("steps", "steps that were scheduled", lambda status: status.counts.steps),
    _counter("prompt_tokens", "tokens of admitted prompts", lambda status: status.counts.prompt_tokens),
    _counter("cached_tokens", "those the prefix cache had", lambda status: status.counts.cached_tokens),
    _counter("generated_tokens", "tokens of answers", lambda status: status.counts.generated_tokens),
    _counter("drafted_tokens", "tokens the draft proposed", lambda status: status.counts.drafted_tokens),
    _counter("accepted_tokens", "those that were right", lambda status: status.counts.accepted_tokens),
    _counter(
        "preemptions",
        "requests whose pages were taken for others, to be filled again",
        lambda status: status.counts.preemptions,
    ),
)
"""Every metric of the engine, in the order of the page."""


class EngineCollector(Collector):
    """Reads the table from the engine's status, once per scrape."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The table's metrics as they are now."""
        status = self._engine.status()
        for row in ENGINE_METRICS:
            family = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            labels = () if row.label is None else (row.label,)
            metric = family(row.name.removesuffix("_total"), row.meaning, labels=labels)
            for label, value in row.read(status).items():
                metric.add_metric([] if row.label is None else [label], value)
            yield metric


def register(engine: EnginePort, registry: CollectorRegistry) -> None:
    """Let the registry show the engine's metrics."""
    registry.register(EngineCollector(engine))
