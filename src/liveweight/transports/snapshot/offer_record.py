"""What both halves of `ipc_snapshot` agree on: where an offer's files lie, and how a rank learns that it was revoked.

    {directory}/snapshots-{token}/              the transport source's own, named by offers as file://...
        .lock                                   held while the transport source lives
        arena-{token}                           an arena's generation, 8 bytes, little-endian; gone with the arena
        offer-{kind}-{layout}.json              which snapshot is offered, with a proof that its writer has the secret
        {snapshot}/                             a snapshot, committed and not synced

No socket: whoever sees the files reads them, also after the source was killed. An offer may as well name one snapshot of a store.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

import msgspec

from liveweight.errors import MessageInvalid, VersionNotOffered, WrongSecret
from liveweight.observe.events import OfferKind
from liveweight.spec.decoders import from_json
from liveweight.transports.ipc.arena import CLOSED, combined
from liveweight.transports.snapshot.disk.names import COMMIT
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import Offer

MODE = "ipc_snapshot"
SCHEME = "file://"
LOCK = ".lock"
_PURPOSE = "liveweight snapshot offer v1"


class OfferRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is offered of a layout now: a snapshot's directory, and the arenas whose generations must still be that."""

    kind: OfferKind
    layout: str
    snapshot: str
    arenas: tuple[str, ...]
    generation: int


class _SignedRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    proof: str
    record: msgspec.Raw


def record_name(kind: OfferKind, layout: str) -> str:
    """The file of a record."""
    return f"offer-{kind}-{layout}.json"


def encode_record(record: OfferRecord, secret: Secret) -> bytes:
    """The record and its proof, as bytes of its file."""
    body = msgspec.json.encode(record)
    return msgspec.json.encode(
        _SignedRecord(proof=secret.derive(_PURPOSE, body).hex(), record=msgspec.Raw(body))
    )


def read_record(directory: Path, kind: OfferKind, layout: str, secret: Secret) -> OfferRecord:
    """The record of the transport source in that directory. Raises VersionNotOffered if there is none, WrongSecret if its writer has
    another secret."""
    path = directory / record_name(kind, layout)
    try:
        data = path.read_bytes()
    except OSError:
        offered = sorted(_describe(found.name) for found in directory.glob("offer-*.json"))
        raise VersionNotOffered(f"{kind} layout {layout}", offered) from None
    try:
        signed = from_json(data, _SignedRecord)
        record = from_json(signed.record, OfferRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageInvalid(f"{path} is no offer of ours: {error}") from error
    if not hmac.compare_digest(secret.derive(_PURPOSE, bytes(signed.record)).hex(), signed.proof):
        raise WrongSecret(f"{path} was written by a source that has another secret")
    if (record.kind, record.layout) != (kind, layout):
        raise MessageInvalid(f"{path} is an offer of {record.kind} layout {record.layout}")
    return record


def _describe(name: str) -> str:
    _, kind, layout = name.removesuffix(".json").split("-", 2)
    return f"{kind} layout {layout}"


def generation_of(directory: Path, arenas: Sequence[str]) -> int:
    """The generation of an offer's arenas, as the offer carries it; CLOSED if one of them is gone."""
    return combined(_generation(directory / arena) for arena in arenas)


def _generation(path: Path) -> int:
    try:
        return int.from_bytes(path.read_bytes(), "little")
    except OSError:
        return CLOSED


def directory_of(address: str) -> Path:
    """The directory that an offer's source names; MessageInvalid for any other address."""
    if not address.startswith(SCHEME):
        raise MessageInvalid(f"{address} is no directory of files, as in {SCHEME}/snapshots/000001-step_1")
    return Path(address.removeprefix(SCHEME))


def offer_of(snapshot: OpenSnapshot) -> Offer:
    """A complete snapshot as an offer, for a round without a trainer: ranks read it through `reader`, and verify as always.

    Its digests are those of `snapshot.commit.manifest`.
    """
    return Offer(
        mode=MODE,
        kind="frozen",
        source=f"{SCHEME}{snapshot.path.absolute()}",
        layout=snapshot.commit.snapshot,
        generation=generation_of_snapshot(snapshot),
    )


def generation_of_snapshot(snapshot: OpenSnapshot) -> int:
    """A complete snapshot never changes: its id stands in for a generation."""
    return int(snapshot.commit.snapshot[:12], 16)


def is_snapshot(directory: Path) -> bool:
    """Whether a directory is one complete snapshot, and not a transport source's."""
    return (directory / COMMIT).exists()
