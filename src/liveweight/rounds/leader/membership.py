"""The ranks of a replica and the tensors that they own together; the manifests and versions that the replica was given.

Pure records of the leader: they check, they do not decide.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from liveweight.errors import LayoutInvalid, ManifestInvalid, ReplicaIncomplete, VersionConflict, WrongState
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes
from liveweight.spec.digest import ContentDigest, Lanes
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import KeptSet, Manifest, OptionalGroup, Version, compare, left_out, named_as
from liveweight.wire.messages import Join, Open

HANDSHAKES = 16
"""How many handshake tokens are remembered: more than controllers can send between one controller's token and its check."""
STRUCTURES = 16
LABELS = 4096


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """A rank that has joined: the peer that it sends as, and the seat that it was given. A predecessor of the rank had others."""

    peer: bytes
    seat: int
    pid: int
    layout: Layout
    serving: Version | None
    optional: tuple[OptionalGroup, ...] = ()
    in_place: bool = False


class Membership:
    """The ranks of a replica; complete once every one has joined and their regions tile every tensor."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._seats = 0
        self.members: dict[int, JoinedRank] = {}
        self.handshakes: deque[str] = deque(maxlen=HANDSHAKES)
        """The handshake tokens that controllers have sent to the engine, the newest last. Written by other threads, too."""
        self.digest_sums: DigestSums | None = None

    def candidate(self, peer: bytes, body: Join) -> tuple[dict[int, JoinedRank], DigestSums | None]:
        """The replica with this rank in it. Refused if the regions of its ranks then overlap in part or do not cover every element, or if
        the rank belongs to another engine."""
        if body.met and body.met not in self.handshakes:
            raise WrongState("not the leader of this rank's engine", "join")
        if not 0 <= body.rank < self.world:
            raise LayoutInvalid(f"rank {body.rank} joins a replica of {self.world}")
        member = JoinedRank(
            *(peer, self._seats + 1, body.pid),
            layout=body.layout,
            serving=body.serving,
            optional=body.optional,
            in_place=body.in_place,
        )
        members = self.members | {body.rank: member}
        if len(members) < self.world:
            return members, None
        digest_sums = DigestSums([members[rank].layout for rank in range(self.world)])
        _check_optional(members, digest_sums)
        if len({member.in_place for member in members.values()}) > 1:
            raise LayoutInvalid("some ranks of the replica have a shadow, and others are updated in place")
        return members, digest_sums

    @property
    def optional(self) -> tuple[OptionalGroup, ...]:
        """The groups of tensors that an offer may leave out; all ranks of a complete replica agree about them."""
        return next((member.optional for member in self.members.values()), ())

    @property
    def in_place(self) -> bool:
        """Whether a commit overwrites live weights; all ranks of a complete replica agree about it."""
        return any(member.in_place for member in self.members.values())

    def adopt(self, candidate: tuple[dict[int, JoinedRank], DigestSums | None]) -> None:
        """Let the rank in."""
        self.members, self.digest_sums = candidate
        self._seats += 1

    def leave(self, rank: int) -> JoinedRank | None:
        """A rank is gone; the replica is incomplete until another joins in its place."""
        member = self.members.pop(rank, None)
        if member is not None:
            self.digest_sums = None
        return member

    def serve(self, version: Version | None) -> None:
        """All ranks serve that version now."""
        self.members = {rank: replace(member, serving=version) for rank, member in self.members.items()}

    def whole(self) -> DigestSums:
        """The complete replica's digest sums; ReplicaIncomplete while ranks are missing."""
        if self.digest_sums is None:
            raise self.incomplete()
        return self.digest_sums

    def incomplete(self) -> ReplicaIncomplete:
        """The error that names who is missing."""
        absent = ", ".join(str(rank) for rank in range(self.world) if rank not in self.members)
        return ReplicaIncomplete(f"a round is not possible while waiting for rank {absent} to join")

    def names_of(self, chosen: npt.NDArray[np.bool_] | None) -> set[str] | None:
        """All names of the expected tensors that are chosen; None if that is not known."""
        if chosen is None or self.digest_sums is None:
            return None
        tensors = self.digest_sums.expected.tensors
        return {name for number in np.flatnonzero(chosen) for name in tensors[number].names}

    def common_version(self) -> Version | None:
        """The version that all ranks serve; None if they differ."""
        versions = {member.serving for member in self.members.values()}
        return versions.pop() if len(versions) == 1 else None


def _check_optional(members: Mapping[int, JoinedRank], digest_sums: DigestSums) -> None:
    """Refuse groups about which ranks disagree, or which have tensors that no rank owns."""
    known = {spec.name for spec in digest_sums.expected}
    for rank, member in members.items():
        if member.optional != members[0].optional:
            raise LayoutInvalid(
                f"rank 0 and rank {rank} disagree about the tensors that an offer may leave out"
            )
        strange = [name for group in member.optional for name in group.tensors if name not in known]
        if strange:
            raise LayoutInvalid(f"{strange[0]}: may be left out of offers, but no rank owns a part of it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFit:
    """How a manifest fits: how many tensors it has, which of them fills each one expected, and the groups that it leaves out, with their
    tensors. `declared`: the publisher's kept set, which was compared with what was live then.

    `content` makes the digest of a version of it, in the names that the replica knows its tensors by.
    """

    tensors: int
    sources: npt.NDArray[np.int64]
    kept: tuple[str, ...]
    kept_tensors: tuple[str, ...]
    content: ContentDigest
    declared: KeptSet | None = None


def fit_manifest(
    manifest: Manifest,
    digest_sums: DigestSums,
    optional: Iterable[OptionalGroup] = (),
    declared: KeptSet | None = None,
) -> ManifestFit:
    """How an offer's manifest fits the replica; ManifestMismatch with the names if it does not."""
    optional = (*optional, *(() if declared is None else (declared.group(),)))
    compare(digest_sums.expected, manifest, optional)
    absent = left_out(manifest, optional)
    tensors = dict.fromkeys(name for group in absent for name in group.tensors)
    return ManifestFit(
        tensors=len(manifest.tensors),
        sources=digest_sums.sources(manifest, tensors),
        kept=tuple(group.name for group in absent),
        kept_tensors=tuple(tensors),
        content=ContentDigest(named_as(manifest, digest_sums.expected)),
        declared=declared,
    )


class Ledger:
    """Manifests by the name that rounds use for them, and the content that each label of a run stood for.

    Of a manifest that fits only its fit is noted; of a version that was published, which optional groups it had left out.
    """

    def __init__(self) -> None:
        self._manifests: OrderedDict[str, ManifestFit] = OrderedDict()
        self._labels: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._kept: OrderedDict[Version, tuple[str, ...]] = OrderedDict()

    def note_fit(self, structure: str, fit: ManifestFit) -> None:
        """Let rounds name a manifest that fits by `structure`."""
        self._manifests[structure] = fit
        while len(self._manifests) > STRUCTURES:
            self._manifests.popitem(last=False)

    def on_changed(self, changed: Collection[str] | None) -> None:
        """A round has changed these live tensors (None: any of them). A kept set that has one of them must be compared again."""
        for structure, fit in list(self._manifests.items()):
            if fit.declared is not None and (
                changed is None or not set(changed).isdisjoint(fit.kept_tensors)
            ):
                del self._manifests[structure]

    def forget_manifests(self) -> None:
        """The replica's ranks have changed: what fitted may fit no more."""
        self._manifests.clear()

    def fit(self, body: Open) -> ManifestFit:
        """How the offer's manifest fits; ManifestInvalid where it was not described."""
        found = self._manifests.get(body.structure)
        if found is None:
            raise ManifestInvalid("the offer's manifest was not described to this replica")
        return found

    def digests(self, body: Open) -> Lanes | None:
        """The digests of an offer's tensors, in the order of the tensors that the replica expects; of kept ones, any."""
        fit = self.fit(body)
        return None if body.digests is None else lanes_from_bytes(body.digests, fit.tensors)[fit.sources]

    def check(self, body: Open) -> None:
        """Refuse an offer that cannot be verified as asked, or whose label stood for other content."""
        if self.digests(body) is None and body.verify and body.offer.kind != "ring":
            raise ManifestInvalid("a verified round needs the digests of its tensors")
        known = self._labels.get((body.version.run, str(body.version)))
        if known is not None and body.version.digest not in (None, known):
            raise VersionConflict(f"{body.version} of this run was published before with other content")

    def content_of(self, body: Open) -> Version:
        """The offer's version with the digest of its content, in the names that the replica knows its tensors by. As it is, where the
        content is not known."""
        if body.digests is None:
            return body.version
        fit = self.fit(body)
        digest = fit.content.of(lanes_from_bytes(body.digests, fit.tensors))
        return msgspec.structs.replace(body.version, digest=digest)

    def note_kept(self, version: Version, kept: tuple[str, ...]) -> None:
        """Note which optional groups the version of a round leaves out."""
        if kept:
            self._kept[version] = kept
        while len(self._kept) > LABELS:
            self._kept.popitem(last=False)

    def kept(self, version: Version | None) -> tuple[str, ...]:
        """The optional groups that the version had left out. Its digest is one of names, too: the same version, the same groups."""
        return () if version is None else self._kept.get(version, ())

    def published(self, version: Version | None) -> None:
        """Note the content of a label once the version serves, here or, as a joining rank says, before. A known label stays as it is."""
        if version is None or version.digest is None or not version.content_known:
            return
        self._labels.setdefault((version.run, str(version)), version.digest)
        while len(self._labels) > LABELS:
            self._labels.popitem(last=False)
