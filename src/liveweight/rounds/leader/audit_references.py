"""Audit references: the digests that the tensors of a version should have. Pure.

Made from a manifest, or from the digests of a round. Which reference counts, and which ranks to ask, is audit's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from liveweight.errors import ManifestInvalid, ManifestMismatch
from liveweight.plan.digest_sums import KEPT, DigestSums, lanes_from_bytes
from liveweight.rounds.leader.membership import ManifestFit
from liveweight.spec.digest import SEEDS, ContentDigest, Lanes, from_hex
from liveweight.spec.manifest import Manifest, named_as

Numbers: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReference:
    """Digests of the tensors that a replica expects, in its order; where `known` is false, the digest is unknown.

    `content` makes the version's digest: of the expected tensors that `filled` lists. `parts` are the digests
    of every rank's placements, where they are known: with them a rank that differs can be named.
    """

    content: ContentDigest
    filled: Numbers
    lanes: Lanes
    known: Mask
    parts: tuple[Lanes, ...] | None = None

    def differing(self, totals: Lanes) -> Mask:
        """Which of the tensors whose digest is known are not what they should be."""
        wrong: Mask = self.known & (totals != self.lanes).any(axis=1)
        return wrong

    def digest(self, totals: Lanes) -> str:
        """The version's digest, if its tensors have these."""
        return self.content.of(totals[self.filled])


def of_manifest(
    digest_sums: DigestSums, manifest: Manifest, parts: tuple[Lanes, ...] | None = None
) -> AuditReference:
    """The reference from a manifest, which may list a part of the tensors.

    Raises ManifestMismatch with the names that the replica does not have, or has in another form; ManifestInvalid without digests.
    """
    differences = list(_misfits(digest_sums.expected, manifest))
    if differences:
        raise ManifestMismatch(differences)
    digests = [spec.digest for spec in manifest if spec.digest is not None]
    if len(digests) < len(manifest.tensors):
        bare = next(spec.name for spec in manifest if spec.digest is None)
        raise ManifestInvalid(f"{bare} has no digest to compare with")
    given = manifest.by_name()
    absent = {spec.name for spec in digest_sums.expected if not any(name in given for name in spec.names)}
    lanes = np.stack([from_hex(digest) for digest in digests])
    content = ContentDigest(named_as(manifest, digest_sums.expected))
    return _reference(digest_sums.sources(manifest, absent), lanes, content, parts)


def of_round(
    fit: ManifestFit, digests: bytes | None, parts: Sequence[Lanes], base: AuditReference | None
) -> AuditReference | None:
    """The reference after a round: its offer's digests, and those of the base for kept tensors. None: the content is not known."""
    if digests is None:
        return None
    brought = lanes_from_bytes(digests, fit.tensors)
    made = _reference(fit.sources, brought, fit.content, tuple(parts) or None)
    if base is None:
        return made
    lanes = np.where(made.known[:, None], made.lanes, base.lanes)
    return replace(made, lanes=lanes, known=made.known | base.known)


def _reference(
    sources: Numbers, lanes: Lanes, content: ContentDigest, parts: tuple[Lanes, ...] | None
) -> AuditReference:
    """From digests in their source's order; `sources` says for every expected tensor which of them is its own."""
    known = sources != KEPT
    filled = np.zeros(len(lanes), dtype=np.int64)
    filled[sources[known]] = np.flatnonzero(known)
    own = np.zeros((len(sources), SEEDS), dtype=np.uint32)
    own[known] = lanes[sources[known]]
    return AuditReference(content=content, filled=filled, lanes=own, known=known, parts=parts)


def _misfits(expected: Manifest, manifest: Manifest) -> Iterator[str]:
    """How a manifest that may list a part of the tensors does not fit."""
    expects, filled = expected.by_name(), dict[str, str]()
    for have in manifest:
        want = next((expects[name] for name in have.names if name in expects), None)
        if want is None:
            yield f"{have.name} unexpected"
        elif (have.dtype, have.shape) != (want.dtype, want.shape):
            yield f"{have.name} is {want.describe()} here, and {have.describe()} in the manifest"
        elif filled.setdefault(want.name, have.name) != have.name:
            yield f"{filled[want.name]} and {have.name} are one tensor here"
