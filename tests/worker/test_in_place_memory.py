"""What a round in place costs a rank in memory: bounded buffers, whatever the size of the weights; and its addresses stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent, OverwritingBegan, RankStaged, RankVerified
from tests.support.stepping import publisher, serving

MB = 1 << 20
WEIGHTS_MB, ALLOWED_MB = 96, 24


def anonymous_bytes() -> int:
    """What this process holds that is shared with nobody: a source's arenas and rings are, the weights and a shadow are not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Peak:
    """The most that was held at the moments of an overwriting."""

    def __init__(self) -> None:
        self.bytes, self.moments = 0, set[type]()

    def on_event(self, event: AnyEvent) -> None:
        """The rank's events: in the middle, at the end of the reading, and of the digest."""
        if isinstance(event, OverwritingBegan | RankStaged | RankVerified):
            self.bytes = max(self.bytes, anonymous_bytes())
            self.moments.add(type(event))


@pytest.mark.parametrize(("offer", "shadow"), [("frozen", "none"), ("ring", "none"), ("frozen", "device")])
def test_a_round_in_place_takes_no_memory_that_grows_with_the_weights(
    short_path: Path, offer: str, shadow: str
) -> None:
    rows = WEIGHTS_MB * MB // 4 // 1024 // 8
    held = {f"w{n}": torch.zeros(rows, 1024) for n in range(8)}
    source = {name: torch.full_like(tensor, 2.0) for name, tensor in held.items()}
    addresses = [tensor.data_ptr() for tensor in held.values()]
    bus, peak = Bus(), Peak()
    bus.subscribe(peak.on_event)
    with (
        serving(held, short_path, bus, shadow=shadow) as address,
        publisher(source, address, short_path, offer=offer, timeout_s=60.0) as sender,
    ):
        before = anonymous_bytes()
        assert sender.publish(1).verified
        assert all(torch.equal(held[name], source[name]) for name in held)
        extra_mb = (peak.bytes - before) / MB
    if shadow == "none":
        assert peak.moments == {OverwritingBegan, RankStaged, RankVerified}
        assert extra_mb < ALLOWED_MB
        assert [tensor.data_ptr() for tensor in held.values()] == addresses
    else:
        assert extra_mb > WEIGHTS_MB - ALLOWED_MB, "what is measured would show a shadow"
