"""Ring rounds beside the ordinary: tensors that no kernel reads, larger than the ring, or made one by one."""

from __future__ import annotations

from pathlib import Path

import torch

import liveweight as lw
from liveweight.observe.bus import Bus
from liveweight.observe.events import LiveOfferImpossible
from liveweight.trainer.sources.in_memory import IteratorSource
from tests.support.stepping import publisher, serving


def test_a_tensor_larger_than_the_ring_and_one_that_no_kernel_casts_arrive_verified(short_path: Path) -> None:
    held = {"big": torch.zeros(50, 1000), "odd": torch.zeros(70, 33, dtype=torch.bfloat16)}
    source = {"big": torch.randn(50, 1000), "odd": torch.randn(33, 70, dtype=torch.float64).t()}
    ring = lw.RingSettings(size_bytes=16384, segments=2)
    with (
        serving(held, short_path) as address,
        publisher(source, address, short_path, offer="ring", ring=ring) as sender,
    ):
        for label in (1, 2):
            source["odd"].add_(label)
            report = sender.publish(label)
            assert (report.offer, report.verified) == ("ring", True)
            assert torch.equal(held["big"], source["big"])
            assert torch.equal(held["odd"], source["odd"].to(torch.bfloat16))
        assert sender.verify().match


def test_a_source_that_makes_its_tensors_one_by_one_is_frozen_and_says_why(short_path: Path) -> None:
    held, bus, emitted = {"w": torch.zeros(4)}, Bus(), list[object]()
    source = IteratorSource([("w", "float32", (4,))], lambda: iter([("w", torch.ones(4))]))
    with (
        bus.subscribe(emitted.append),
        serving(held, short_path) as address,
        publisher(source, address, short_path, offer="ring", bus=bus) as sender,
    ):
        assert sender.publish(1).offer == "frozen"
    (why,) = [event for event in emitted if isinstance(event, LiveOfferImpossible)]
    assert (why.kind, "one by one" in why.reason) == ("ring", True)
