"""Live weight updates for RL post-training: into running engines, verified to the bit, all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liveweight import snapshots
    from liveweight.api import Publisher, Receiver, share_module
    from liveweight.errors import LiveWeightError, OutcomeUnknown, RoundFailed, Torn
    from liveweight.integrations.paddle import paddle_source
    from liveweight.integrations.vllm.engine import vllm
    from liveweight.rounds.report import Report
    from liveweight.rounds.undo_and_verify import Verification
    from liveweight.spec.dtype import DType
    from liveweight.spec.layout import Piece
    from liveweight.spec.manifest import TensorSpec, Version
    from liveweight.spec.region import box, whole
    from liveweight.trainer.sources.gathering_source import GatheringSource
    from liveweight.trainer.sources.in_memory import IteratorSource
    from liveweight.transports.packing_source import RingSettings
    from liveweight.wire.credentials import Secret

_HOMES = {
    "LiveWeightError": "liveweight.errors",
    "OutcomeUnknown": "liveweight.errors",
    "DType": "liveweight.spec.dtype",
    "Piece": "liveweight.spec.layout",
    "GatheringSource": "liveweight.trainer.sources.gathering_source",
    "IteratorSource": "liveweight.trainer.sources.in_memory",
    "Publisher": "liveweight.api",
    "Receiver": "liveweight.api",
    "Report": "liveweight.rounds.report",
    "RingSettings": "liveweight.transports.packing_source",
    "RoundFailed": "liveweight.errors",
    "Secret": "liveweight.wire.credentials",
    "TensorSpec": "liveweight.spec.manifest",
    "Torn": "liveweight.errors",
    "Verification": "liveweight.rounds.undo_and_verify",
    "Version": "liveweight.spec.manifest",
    "box": "liveweight.spec.region",
    "paddle_source": "liveweight.integrations.paddle",
    "share_module": "liveweight.api",
    "vllm": "liveweight.integrations.vllm.engine",
    "whole": "liveweight.spec.region",
}

__all__ = [
    "DType",
    "GatheringSource",
    "IteratorSource",
    "LiveWeightError",
    "OutcomeUnknown",
    "Piece",
    "Publisher",
    "Receiver",
    "Report",
    "RingSettings",
    "RoundFailed",
    "Secret",
    "TensorSpec",
    "Torn",
    "Verification",
    "Version",
    "box",
    "paddle_source",
    "share_module",
    "snapshots",
    "vllm",
    "whole",
]


def __getattr__(name: str) -> object:
    """Names load when they are first used: `import liveweight` alone loads neither torch nor zmq."""
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("liveweight")
    if name == "snapshots":
        return importlib.import_module("liveweight.snapshots")
    if name not in _HOMES:
        raise AttributeError(f"module 'liveweight' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
