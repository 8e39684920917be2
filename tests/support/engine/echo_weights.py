"""What the echo engine holds: two tensors on one rank, verified as the real one's are."""

from __future__ import annotations

import numpy as np

from liveweight.engine.updates.verifying import VerificationRequest, VerificationResult
from liveweight.plan.digest_sums import DigestSums
from liveweight.rounds.leader.audit_references import of_manifest
from liveweight.rounds.leader.audit_verdicts import InstalledVersion, choose, verdict
from liveweight.spec.digest import to_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import Manifest, TensorSpec, Version

_SPECS = (
    TensorSpec(name="model.norm.weight", dtype=DType.BFLOAT16, shape=(4,)),
    TensorSpec(name="lm_head.weight", dtype=DType.BFLOAT16, shape=(8, 4), aliases=("embed.weight",)),
)
_LANES = np.arange(8, dtype=np.uint32).reshape(2, 4)
HELD = Manifest(tensors=_SPECS).with_digests([to_hex(lanes) for lanes in _LANES])
"""The tensors, with the digests that they were installed with."""


def verify_held(request: VerificationRequest, serving: Version, *, damaged: bool) -> VerificationResult:
    """What the engine finds. `damaged`: the norm is no longer what was installed."""
    digest_sums = DigestSums([packed(_SPECS)])
    lanes = _LANES.copy()
    lanes[0, 0] ^= damaged
    given = None if request.manifest is None else of_manifest(digest_sums, request.manifest)
    found = verdict(
        digest_sums,
        [lanes],
        seconds=[0.25],
        chosen=choose(digest_sums, request.names, given),
        given=given,
        installed=(InstalledVersion(serving, of_manifest(digest_sums, HELD, (_LANES,))), InstalledVersion()),
        listed=request.listed,
    )
    return VerificationResult(
        verdict=found, compared_with=serving if request.against == "installed" else None
    )
