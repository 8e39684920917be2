"""The log: one line per event, through the standard logger `liveweight`.

Owns levels and wording. Handlers, formats and files belong to the program that uses the library.
"""

from __future__ import annotations

import logging
from logging import DEBUG, ERROR, INFO, WARNING
from typing import assert_never

from liveweight.observe import events as ev
from liveweight.observe.bus import Bus

_LOGGER = logging.getLogger("liveweight")

_LEVEL_OF = {
    ev.RoundOutcome.COMMITTED: INFO,
    ev.RoundOutcome.UNCHANGED: INFO,
    ev.RoundOutcome.UNDONE: INFO,
    ev.RoundOutcome.REFUSED: WARNING,
    ev.RoundOutcome.ABORTED: WARNING,
    ev.RoundOutcome.TORN: ERROR,
    ev.RoundOutcome.UNKNOWN: ERROR,
}


def log(event: ev.AnyEvent) -> None:
    """The reader: writes the event's line."""
    level, text = line_of(event)
    _LOGGER.log(level, "%s", text)


def logging_bus() -> Bus:
    """A bus whose events are log lines: the default for a program that gives none."""
    bus = Bus()
    bus.subscribe(log)
    return bus


def line_of(event: ev.AnyEvent) -> tuple[int, str]:
    """The level and the text of an event's line."""
    match event:
        case ev.RoundEvent():
            level, text = _step(event)
            return level, f"{_subject(event)}, round {event.round}: {text}"
        case ev.AuditBegan():
            return DEBUG, f"{event.replica} rank {event.rank}: digesting what it holds"
        case ev.Audited(match=False):
            named = ", ".join(event.differing)
            holds = f"holds {_named(event.serving)}, and {event.count} tensors differ: {named}"
            return ERROR, f"{event.replica}: {holds}"
        case ev.Audited():
            found = "found as it should be" if event.match else "nothing to compare with"
            return INFO, f"{event.replica}: digested {_named(event.serving)} in {event.took_s:.3f} s, {found}"
        case (
            ev.OfferMade()
            | ev.SourceFrozen()
            | ev.LiveOfferImpossible()
            | ev.ModeFailed()
            | ev.BucketDamaged()
            | ev.ReadersRevoked()
        ):
            return _source(event)
        case (
            ev.SnapshotSaved()
            | ev.SnapshotAbandoned()
            | ev.SnapshotFailed()
            | ev.RecoveryBegan()
            | ev.Recovered()
        ):
            level, text = _snapshot_or_recovery(event)
            return level, f"{event.replica}: {text}"
        case ev.VersionConfirmed() | ev.MarkedBehind():
            return _fleet(event)
        case ev.PeerRefused():
            return WARNING, f"{event.code} refused a peer: {event.reason}"
        case ev.KernelsChosen(reason=None):
            return INFO, f"{event.name} kernels"
        case ev.KernelsChosen():
            return WARNING, f"{event.name} kernels, slower than native ones: {event.reason}"
        case _:
            assert_never(event)


def _fleet(event: ev.VersionConfirmed | ev.MarkedBehind) -> tuple[int, str]:
    match event:
        case ev.VersionConfirmed():
            return DEBUG, f"{event.replica}: {event.version} was installed already"
        case ev.MarkedBehind():
            return (
                WARNING,
                f"{event.replica}: takes no requests before a round, behind {event.version}: {event.reason}",
            )


def _step(event: ev.AnyStep) -> tuple[int, str]:
    match event:
        case ev.RoundOpened():
            keeping = f", keeping its {', '.join(event.kept)}" if event.kept else ""
            return INFO, f"opened, from {_named(event.serving)} to {event.version}{keeping}"
        case ev.StagingBegan():
            return DEBUG, f"staging {event.version}"
        case ev.OverwritingBegan():
            return DEBUG, f"overwriting its weights with {event.version}"
        case ev.RankStaged():
            return DEBUG, f"staged {event.size_bytes} bytes of {event.version} in {event.took_s:.3f} s"
        case ev.RankVerified():
            return DEBUG, f"verified {event.version} in {event.took_s:.3f} s"
        case ev.VoteCast(objection=None):
            return DEBUG, f"voted yes to {event.version}, for {event.lease_s:.1f} s"
        case ev.VoteCast():
            return WARNING, f"voted no to {event.version}: {event.objection}"
        case ev.RoundCommitted():
            return INFO, f"committed {event.version}, decoding stood still for {event.stall_s:.3f} s"
        case ev.RoundGivenUp():
            return WARNING, f"{event.code} aborted {event.version} in {event.step}: {event.reason}"
        case ev.RoundUndone():
            return INFO, f"took back {event.version}, {event.serving} serves again"
        case ev.LeaseExpired():
            return WARNING, f"received no decision on {event.version} within {event.lease_s:.1f} s"
        case ev.RoundEnded():
            return _LEVEL_OF[event.outcome], _ending(event)
        case _:
            assert_never(event)


def _source(
    event: ev.OfferMade
    | ev.SourceFrozen
    | ev.LiveOfferImpossible
    | ev.ModeFailed
    | ev.BucketDamaged
    | ev.ReadersRevoked,
) -> tuple[int, str]:
    match event:
        case ev.OfferMade():
            holds = f"{event.tensors} tensors, {event.size_bytes} bytes"
            return INFO, f"offered {event.version} ({event.kind}): {holds}"
        case ev.SourceFrozen():
            froze = f"{event.size_bytes} bytes of {event.version} in {event.took_s:.3f} s"
            return DEBUG, f"trainer rank {event.rank}: froze {froze}"
        case ev.LiveOfferImpossible():
            why = f"no {event.kind} offer of {event.version}: {event.reason}"
            return WARNING, f"{why}; freezing instead, said again only if the reason changes"
        case ev.ModeFailed():
            failed = f"transfer mode {event.mode} failed ({event.code} {event.reason})"
            return WARNING, f"{failed}; the next attempt uses {event.following}"
        case ev.BucketDamaged():
            return WARNING, f"bucket {event.bucket}, with {event.tensor}, was damaged, and is packed again"
        case ev.ReadersRevoked():
            late = f"after {event.waited_s:.1f} s, which was still read by {', '.join(event.readers)}"
            return WARNING, f"revoked the offer before {late}"


def _snapshot_or_recovery(
    event: ev.SnapshotSaved | ev.SnapshotAbandoned | ev.SnapshotFailed | ev.RecoveryBegan | ev.Recovered,
) -> tuple[int, str]:
    match event:
        case ev.RecoveryBegan():
            return WARNING, f"{event.reason}; starting its ranks again"
        case ev.Recovered():
            return WARNING, _recovery(event)
        case ev.SnapshotSaved():
            saved = f"{event.size_bytes} bytes in {event.took_s:.3f} s"
            return INFO, f"saved {event.version} in {event.path}, {saved}"
        case ev.SnapshotAbandoned():
            return INFO, f"left the snapshot of {event.version}: other weights came first"
        case ev.SnapshotFailed():
            return WARNING, f"{event.code} no snapshot of {event.version}, which serves on: {event.reason}"


def _recovery(event: ev.Recovered) -> str:
    behind = "" if event.behind is None else f", behind {event.behind}"
    notes = "".join(f"; {note}" for note in event.notes)
    return f"serves {event.version} again, from its {event.origin}{behind}, after {event.took_s:.1f} s{notes}"


def _ending(event: ev.RoundEnded) -> str:
    checked = "" if event.verified or event.outcome is not ev.RoundOutcome.COMMITTED else ", not verified"
    return f"{event.outcome} after {event.took_s:.3f} s{checked}, serving {_named(event.serving)}"


def _subject(event: ev.AnyStep) -> str:
    match event:
        case (
            ev.StagingBegan(rank=rank)
            | ev.OverwritingBegan(rank=rank)
            | ev.RankStaged(rank=rank)
            | ev.RankOrReplicaEvent(rank=int(rank))
        ):
            return f"{event.replica} rank {rank}"
        case _:
            return event.replica


def _named(version: str | None) -> str:
    return "no version of ours" if version is None else version
