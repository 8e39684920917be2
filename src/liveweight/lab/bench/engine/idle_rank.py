"""A rank of the idle benchmark: counts its collectives, and may synchronise with the other ranks in every step, as polling engines do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from liveweight.engine.rank import process
from liveweight.engine.rank.rank_group import collectives, join_group
from liveweight.engine.rank.step_runner import StepRunner
from liveweight.engine.serving.step_stream import Step, StepDone

Sync: TypeAlias = Literal["never", "broadcast", "barrier"]
"""How ranks synchronise in a step, beside decoding: not at all; by a broadcast of a flag; by a broadcast and a barrier."""
SYNC_S = 300.0


class CountedGroup:
    """A group whose collectives are counted. See engine/models/forward.Group."""

    def __init__(self, inner: Any, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def called(*given: Any) -> Any:
            self._counts[name] += 1
            return found(*given)

        return called


def main(descriptor: int, *, parent: int, number: int, ranks: int, sync: Sync, place: str) -> None:
    """The rank's main function. `place` is a directory for the ranks' rendezvous and their counts."""
    counts: Counter[str] = Counter()

    class SynchronisedRunner(StepRunner):
        """Runs steps that begin by synchronising the ranks."""

        def run(self, step: Step, send: Callable[[StepDone], None]) -> None:
            counts["steps"] += 1
            if sync != "never":
                self._synchronise(step)
            super().run(step, send)

        def _synchronise(self, step: Step) -> None:
            import torch

            if not hasattr(self, "_gloo"):
                self._gloo = CountedGroup(_gloo(number, ranks, Path(place)), counts)
            self._gloo.broadcast(torch.tensor([step.number]), 0).wait()
            if sync == "barrier":
                self._gloo.barrier().wait()

    vars(process)["StepRunner"] = SynchronisedRunner
    vars(process)["join_group"] = lambda **given: CountedGroup(join_group(**given), counts)
    process.main(descriptor, parent=parent)
    (Path(place) / f"counts-{number}.json").write_text(json.dumps(counts))


def _gloo(number: int, ranks: int, place: Path) -> Any:
    """A group of the ranks beside the model's."""
    import torch.distributed as dist

    store: Any = dist.FileStore(str(place / "beside"), ranks)  # type: ignore[attr-defined]
    return collectives(dist, "gloo", number, ranks, store, SYNC_S)
