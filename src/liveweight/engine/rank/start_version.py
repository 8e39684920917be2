"""The start version: the version of a checkpoint's weights, once all ranks have loaded their share.

A version like any other: its digest is the one that a publisher of the same directory would have, in the engine's dtypes. It is taken
from the ranks' memory, after loading, and not from the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.device import open_device
from liveweight.engine.serving.step_stream import Begin, Loaded
from liveweight.errors import DigestMismatch
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes, lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import to_hex
from liveweight.spec.manifest import Version
from liveweight.spec.version_age import START_RUN
from liveweight.worker.join import JoinContent
from liveweight.worker.shadow_digest import ShadowDigest

if TYPE_CHECKING:
    from liveweight.engine.models.model import Model

RUN, LABEL = START_RUN, "initial"
"""Run and label of the start version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartVersion:
    """The version that a rank begins with, and the digests of its content."""

    version: Version
    content: JoinContent


def loaded(model: Model, *, device: str, threads: int, timeout_s: float) -> Loaded:
    """What this rank has loaded, as it lies in memory. In the rank's main thread, before it serves."""
    from liveweight.worker.targets.torch_target import module_target

    target = module_target(model, model.pieces())
    digest = ShadowDigest(target.layout, open_device(device).choose().kernels)
    with CopyThreads(threads) as copy_threads:
        lanes = digest.all_of(target.live(), copy_threads=copy_threads, deadline=Deadline.after(timeout_s))
    return Loaded(target.layout, lanes_to_bytes(lanes))


def named(ranks: Sequence[Loaded]) -> Begin:
    """The version that the ranks hold together.

    DigestMismatch where ranks hold different copies of a tensor: they did not read the same files.
    """
    digest_sums = DigestSums([rank.layout for rank in ranks])
    partials = [lanes_from_bytes(rank.lanes, len(rank.layout.placements)) for rank in ranks]
    totals, disagreeing = digest_sums.combine(partials)
    if disagreeing:
        raise DigestMismatch(disagreeing, "the ranks, after loading")
    manifest = digest_sums.expected.with_digests([to_hex(lanes) for lanes in totals])
    return Begin(Version(run=RUN, label=LABEL, digest=manifest.digest()), manifest)
