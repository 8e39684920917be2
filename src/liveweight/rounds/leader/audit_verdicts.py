"""Audit verdicts: the digests of the ranks' live weights, compared with what they should be. Pure.

Owns the comparison. Whether the digests belong to one state of all ranks is audit's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np

from liveweight.errors import ManifestMismatch
from liveweight.plan.digest_sums import DigestSums
from liveweight.rounds.leader.audit_references import AuditReference, Mask
from liveweight.spec.digest import ContentDigest, Lanes, to_hex
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.messages import Verdict
from liveweight.wire.messages.values import Mismatch

MISMATCHES_REPORTED = 100
EMPTY: Mapping[str, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InstalledVersion:
    """A version, and the digests that its tensors should have, if they are known. `changed`: which tensors rounds have filled since the
    replica was started (None: none). `damaged`: an audit found that ranks hold something else."""

    version: Version | None = None
    reference: AuditReference | None = None
    changed: Mask | None = None
    damaged: bool = False

    def expects(self, other: AuditReference | None) -> bool:
        """Whether these digests (None: its own) are those that its tensors should have."""
        if other is None or self.reference is None:
            return other is None
        both = other.known & self.reference.known
        return not (both & (other.lanes != self.reference.lanes).any(axis=1)).any()

    def is_content(self, digest_sums: DigestSums, totals: Lanes) -> bool:
        """Whether these are its tensors' digests; False where that is not known."""
        if self.version is None:
            return False
        if self.reference is not None:
            return not self.reference.differing(totals).any()
        return self.version.digest == ContentDigest(digest_sums.expected).of(totals)


def verdict(
    digest_sums: DigestSums,
    partials: Sequence[Lanes],
    *,
    seconds: Sequence[float],
    chosen: Mask,
    given: AuditReference | None,
    installed: tuple[InstalledVersion, InstalledVersion],
    listed: bool,
    apart: Mapping[str, Sequence[int]] = EMPTY,
    unread: Collection[str] = (),
) -> Verdict:
    """Compare what the ranks hold with what was given, or else with what is installed: `installed` is that, and what was before.
    With tensors of `apart` those ranks do not compute as they digested them; of those in `unread` nobody knows."""
    totals, torn = digest_sums.combine(partials)
    against = installed[0].reference if given is None else given
    found = None
    names = [spec.name for spec in digest_sums.expected]
    if chosen.all() and not torn and not apart:
        found = next((known.version for known in installed if known.is_content(digest_sums, totals)), None)
    wrong = chosen & np.isin(names, [*torn, *apart])
    compared = int(wrong.sum())
    if against is not None:
        wrong |= chosen & against.differing(totals)
        compared = int((chosen & against.known).sum())
    elif found is not None and found == installed[0].version:
        compared = int(chosen.sum())
    return Verdict(
        match=not wrong.any() if compared else None,
        serving=installed[0].version,
        found=found,
        digest=_digest(digest_sums, totals, against, chosen),
        tensors=int(chosen.sum()),
        compared=compared,
        differing=int(wrong.sum()),
        mismatches=_mismatches(digest_sums, wrong, partials, against, installed[0].reference, apart),
        seconds=tuple(seconds),
        manifest=_listing(digest_sums, totals, chosen, torn) if listed else None,
        unread=int((chosen & np.isin(names, list(unread))).sum()),
    )


def choose(digest_sums: DigestSums, names: Sequence[str] | None, reference: AuditReference | None) -> Mask:
    """The tensors to be digested, in the expected order: those that were named; else those that the reference lists; else all."""
    if names is None:
        everything = np.ones(len(digest_sums.expected.tensors), dtype=np.bool_)
        return everything if reference is None else reference.known
    numbers = {name: number for number, spec in enumerate(digest_sums.expected) for name in spec.names}
    unknown = [name for name in names if name not in numbers]
    if unknown or not names:
        raise ManifestMismatch([f"{name} unexpected" for name in unknown] or ["no tensor is named"])
    chosen = np.zeros(len(digest_sums.expected.tensors), dtype=np.bool_)
    chosen[[numbers[name] for name in names]] = True
    if reference is not None and (chosen & ~reference.known).any():
        unlisted = next(name for name in names if not reference.known[numbers[name]])
        raise ManifestMismatch([f"{unlisted} is asked for and not in the manifest"])
    return chosen


def _digest(
    digest_sums: DigestSums, totals: Lanes, against: AuditReference | None, chosen: Mask
) -> str | None:
    """The digest of the whole; None where a tensor of it was not digested."""
    if against is None:
        return ContentDigest(digest_sums.expected).of(totals) if chosen.all() else None
    return against.digest(totals) if chosen[against.filled].all() else None


def _mismatches(
    digest_sums: DigestSums,
    wrong: Mask,
    partials: Sequence[Lanes],
    against: AuditReference | None,
    installed: AuditReference | None,
    apart: Mapping[str, Sequence[int]],
) -> tuple[Mismatch, ...]:
    """The first tensors that differ, each with the ranks that do."""
    numbers = np.flatnonzero(wrong)[:MISMATCHES_REPORTED].tolist()
    if not numbers:
        return ()
    parts = partials if against is None else _parts(digest_sums, against, installed, partials)
    ranks = digest_sums.differing_ranks(partials, parts)
    names = {number: digest_sums.expected.tensors[number].name for number in numbers}
    return tuple(
        Mismatch(name=name, ranks=tuple(sorted({*ranks.get(number, ()), *apart.get(name, ())})))
        for number, name in names.items()
    )


def _parts(
    digest_sums: DigestSums,
    against: AuditReference,
    installed: AuditReference | None,
    partials: Sequence[Lanes],
) -> Sequence[Lanes]:
    """What every rank's part should be, as far as it is known; else what it is. Of tensors that should be what is installed, what the
    ranks held when it was is known."""
    if against.parts is not None:
        return against.parts
    parts = digest_sums.parts_of(against.lanes, partials)
    if installed is None or installed.parts is None:
        return parts
    same = against.known & installed.known & (against.lanes == installed.lanes).all(axis=1)
    return [
        np.where(same[digest_sums.of_placements(rank)][:, None], installed.parts[rank], part)
        for rank, part in enumerate(parts)
    ]


def _listing(digest_sums: DigestSums, totals: Lanes, chosen: Mask, torn: Sequence[str]) -> Manifest:
    """The tensors that were digested, with what was found; copies that disagree have no digest."""
    return Manifest(
        tensors=tuple(
            msgspec.structs.replace(spec, digest=None if spec.name in torn else to_hex(lanes))
            for spec, lanes, wanted in zip(digest_sums.expected, totals, chosen, strict=True)
            if wanted
        )
    )
