"""Every error that liveweight raises, with its stable code and one remedy.

LiveWeightError
├── Refused                    nothing was touched: the request is wrong, not the machine
│   ├── ManifestMismatch       LW-101   what is offered is not what the engine expects
│   ├── ManifestInvalid        LW-102   a manifest that contradicts itself
│   ├── LayoutInvalid          LW-103   regions that overlap in part, or lie outside
│   ├── VersionConflict        LW-104   same run and label, other content
│   ├── VersionNotOffered      LW-105   the source holds another version
│   ├── RoundOpen              LW-106   another round holds the replica
│   ├── WrongState             LW-107   not possible in the state the rank is in
│   ├── ReplicaIncomplete      LW-108   ranks of the replica have not joined
│   ├── WeightsExchanged       LW-109   weights changed while they were being verified
│   ├── SnapshotNotFound       LW-110   no snapshot in any place that was searched
│   ├── SnapshotRefused        LW-111   files that could be another rank's, or not all of them
│   ├── LabelInvalid           LW-112   a label that is neither text nor a number
│   ├── KeptDiffers            LW-113   tensors that the trainer leaves out are not what the engine has
│   ├── VersionNotServed       LW-114   a request demands another version than the one that serves
│   └── TrainerRefused         LW-115   a framework's trainer that asks for what engines do not do
├── WireError                  two processes do not understand each other
│   ├── ProtocolMismatch       LW-201   another protocol version
│   ├── WrongSecret            LW-202   the peer does not hold the shared secret
│   ├── MessageInvalid         LW-203   bytes that are no message of ours
│   ├── MessageTooLarge        LW-204   beyond the size limit
│   ├── ChannelClosed          LW-205   the peer is gone
│   ├── CredentialsUnsafe      LW-206   a secret or socket that others could read
│   └── KeyRefused             LW-207   an engine's HTTP interface wants another key
├── DeadlineExceeded           LW-301   a wait that ended without its answer
├── Damage                     bytes are not what they should be
│   ├── DigestMismatch         LW-401   content differs from the manifest
│   ├── ChecksumMismatch       LW-402   a piece was damaged on its way
│   ├── OfferChanged           LW-403   the source's memory changed while it was read
│   └── SnapshotDamaged        LW-404   files of a snapshot are missing, extra, truncated, stale or corrupted
├── Unavailable                this machine cannot do it
│   ├── MissingExtra           LW-501   an optional dependency is not installed
│   ├── OutOfMemory            LW-502   memory for an arena or a shadow could not be had
│   ├── OutOfSpace             LW-503   a snapshot could not be written where it should be
│   └── AddressUnusable        LW-504   an address that nobody can listen at or connect to from here
├── Torn                       LW-601   an in-place update failed: a mixture, which does not serve
├── OutcomeUnknown             LW-602   the decision of a round could not be learned in time
├── RoundAborted               LW-603   the round was given up by its publisher
├── EngineError                the embedded engine cannot start, or cannot take a request
│   ├── CheckpointInvalid      LW-701   a model directory that cannot be served
│   ├── EngineConfigInvalid    LW-702   settings that contradict each other or the machine
│   ├── RequestInvalid         LW-703   a request that no engine could answer
│   ├── QueueFull              LW-704   as many requests wait as may wait
│   ├── EngineStopping         LW-705   the engine is being stopped
│   ├── RankLost               LW-706   a rank of the engine died or stopped answering
│   └── WeightsPending         LW-707   the engine's ranks are being started again and do not hold their version yet
└── RoundFailed                the code of its cause: a round ended without a commit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Self

NAMES_SHOWN = 8
NAME_CHARACTERS = 240
"""How much of one name, or of what is said about it, an error shows."""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(_cut, names[:NAMES_SHOWN]))
    more = len(names) - NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _cut(text: str) -> str:
    """The text, or its beginning and its end if it is too long."""
    if len(text) <= NAME_CHARACTERS:
        return text
    half = NAME_CHARACTERS // 2
    return f"{text[:half]}…{text[-half:]}"


class LiveWeightError(Exception):
    """Base of the tree. `code` is stable across releases; `remedy` says what to do; `retryable`, whether trying again can help."""

    code: str = "LW-000"
    remedy: str = "report it, with the traceback"
    retryable: bool = False

    @classmethod
    def retold(cls, message: str) -> Self:
        """The error as another process reported it: its text, and the defaults of its further facts."""
        error = cls.__new__(cls)
        Exception.__init__(error, message)
        return error


class Refused(LiveWeightError):
    """A request that was turned down before anything was touched."""

    remedy = "correct the request"


class ManifestMismatch(Refused):
    """What is offered is not what the engine expects; all names, in both directions."""

    code = "LW-101"
    remedy = "publish exactly the tensors that the engine lists, in its dtypes and shapes"
    differences: tuple[str, ...] = ()

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(f"refused: {_listed(differences)}")
        self.differences = tuple(differences)


class ManifestInvalid(Refused):
    """A manifest that contradicts itself: empty, or with a name twice."""

    code = "LW-102"
    remedy = "give every tensor one name, once, and offer at least one; for a checkpoint, name a complete HF directory"


class LayoutInvalid(Refused):
    """Regions that overlap in part, lie outside their tensor or memory, or leave a part of it without an owner."""

    code = "LW-103"
    remedy = "let regions be equal or disjoint, inside their tensor, and cover it"


class VersionConflict(Refused):
    """The same run and label were published before with other content."""

    code = "LW-104"
    remedy = "use a new label, or a new run after a restart"


class VersionNotOffered(Refused):
    """The version asked for is not the one that the source holds."""

    code = "LW-105"
    remedy = "ask for a version that the source offers"
    retryable = True
    asked: str = ""
    offered: tuple[str, ...] = ()

    def __init__(self, asked: str, offered: Sequence[str]) -> None:
        super().__init__(f"asked for {asked}, the source offers {_listed(offered) or 'nothing'}")
        self.asked, self.offered = asked, tuple(offered)


class RoundOpen(Refused):
    """Another round holds the replica."""

    code = "LW-106"
    remedy = "wait for that round to end, or abort it"
    retryable = True
    replica: str = ""
    holder: str = ""

    def __init__(self, replica: str, holder: str) -> None:
        super().__init__(f"{replica} is in a round of {holder}")
        self.replica, self.holder = replica, holder


class WrongState(Refused):
    """The command does not fit the state; the state is unchanged."""

    code = "LW-107"
    remedy = "look at the state first; it is in the message"
    state: str = ""
    command: str = ""

    def __init__(self, state: str, command: str) -> None:
        super().__init__(f"{command} is not possible while {state}")
        self.state, self.command = state, command


class ReplicaIncomplete(Refused):
    """Ranks of the replica have not joined, or were lost and are not replaced yet."""

    code = "LW-108"
    remedy = "wait until the ranks in the message have joined, or start them again"
    retryable = True


class WeightsExchanged(Refused):
    """The weights were swapped while they were being verified, and again at the second try."""

    code = "LW-109"
    remedy = "verify again when no round is about to commit"
    retryable = True


class SnapshotNotFound(Refused):
    """No complete snapshot was found; every place that was searched is named."""

    code = "LW-110"
    remedy = "name the directory of a complete snapshot; `liveweight snapshot list` shows them"
    places: tuple[str, ...] = ()

    def __init__(self, what: str, places: Sequence[str]) -> None:
        super().__init__(f"{what}; looked at: {', '.join(places) or 'nothing'}")
        self.places = tuple(places)


class SnapshotRefused(Refused):
    """Files without a manifest that leave open what they are: gaps, ambiguous names, or another rank's shard."""

    code = "LW-111"
    remedy = (
        "leave exactly one rank's files, numbered without gaps; or restore a snapshot that liveweight wrote"
    )


class LabelInvalid(Refused):
    """What was given as a version's label is neither a text of 1 to 256 printable characters nor an integer of 64 bits."""

    code = "LW-112"
    remedy = "give a label such as 100 or step_100"


class KeptDiffers(Refused):
    """Tensors that the trainer leaves out (`keep`) are not what the trainer has, or not what the engine was started with."""

    code = "LW-113"
    remedy = "start the engine from the checkpoint that the trainer began with, or publish all tensors once, without keep"
    names: tuple[str, ...] = ()

    def __init__(self, names: Sequence[str], why: str) -> None:
        super().__init__(f"kept tensors {why}: {_listed(names)}")
        self.names = tuple(names)


class VersionNotServed(Refused):
    """A request demands a version that the engine does not serve now."""

    code = "LW-114"
    remedy = "ask again when the engine serves it, or ask another engine"
    retryable = True
    demanded: Mapping[str, object] = MappingProxyType({})
    serving: Mapping[str, object] | None = None

    def __init__(self, demanded: Mapping[str, object], serving: Mapping[str, object] | None) -> None:
        """Both as fields: of the demand `min`, `exact` and `run`, of the version `run`, `label`, `digest` and `number`."""
        wanted = ", ".join(f"{name} {value}" for name, value in demanded.items())
        served = "no version"
        if serving is not None:
            number = "without a number" if serving["number"] is None else f"number {serving['number']}"
            served = f"{serving['label']}, {number}, of run {serving['run']}"
        super().__init__(f"the request demands {_cut(wanted)}; this engine serves {served}")
        self.demanded, self.serving = demanded, serving


class TrainerRefused(Refused):
    """A framework's trainer, or a release of the framework, asks for what this package or its engines do not do."""

    code = "LW-115"
    remedy = "change what the message names; docs/trl.md lists what is supported"


class WireError(LiveWeightError):
    """Two processes do not understand each other."""

    remedy = "check that both sides are what you think they are"


class ProtocolMismatch(WireError):
    """The peer speaks another version of the protocol."""

    code = "LW-201"
    remedy = "install the same release of liveweight on both sides"
    ours: int = 0
    theirs: int = 0

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(f"we speak protocol {ours}, the peer speaks {theirs}")
        self.ours, self.theirs = ours, theirs


class WrongSecret(WireError):
    """The peer could not show that it holds the shared secret."""

    code = "LW-202"
    remedy = "give both sides the same secret file"


class MessageInvalid(WireError):
    """Bytes that are no message of ours."""

    code = "LW-203"
    remedy = "something else talks to this socket; check the address"


class MessageTooLarge(WireError):
    """A message beyond the size limit; it was not allocated."""

    code = "LW-204"
    remedy = "raise the limit on both sides if the message is honest"
    size_bytes: int = 0
    limit_bytes: int = 0

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message of {size_bytes} bytes, the limit is {limit_bytes}")
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes


class ChannelClosed(WireError):
    """The peer is gone, or this side was closed."""

    code = "LW-205"
    remedy = "see why the peer ended, then try again"
    retryable = True


class CredentialsUnsafe(WireError):
    """A secret file or a socket directory that other users could read."""

    code = "LW-206"
    remedy = "chmod 0600 the secret file and 0700 the socket directory, owned by you"


class KeyRefused(WireError):
    """An engine's HTTP interface wants a key, or another one."""

    code = "LW-207"
    remedy = "give the engine's control key; where it has none, its API key"


class DeadlineExceeded(LiveWeightError):
    """A wait ended without its answer; it says for whom, and for how long."""

    code = "LW-301"
    remedy = "see what the one waited for was doing; a longer deadline helps only if it was working"
    retryable = True
    waiting_for: str = ""
    waited_s: float = 0.0

    def __init__(self, waiting_for: str, waited_s: float) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {waiting_for}")
        self.waiting_for, self.waited_s = waiting_for, waited_s


class Damage(LiveWeightError):
    """Bytes are not what they should be; nothing of them was committed."""

    remedy = "try again; if it stays, suspect the memory or the link"
    retryable = True


class DigestMismatch(Damage):
    """The content of tensors differs from the manifest."""

    code = "LW-401"
    names: tuple[str, ...] = ()
    where: str = ""

    def __init__(self, names: Sequence[str], where: str) -> None:
        super().__init__(f"{where}: content differs from the manifest: {_listed(names)}")
        self.names, self.where = tuple(names), where


class ChecksumMismatch(Damage):
    """A bucket or part was damaged on its way."""

    code = "LW-402"


class OfferChanged(Damage):
    """The source's memory changed while it was read."""

    code = "LW-403"
    remedy = (
        "try again; do not change parameters of a live offer before publish() returned; "
        "give engines that pull longer (release_s)"
    )


class SnapshotDamaged(Damage):
    """Files of a snapshot are missing, extra, truncated, stale or corrupted; each is named."""

    code = "LW-404"
    remedy = "restore another snapshot, and remove this one; `liveweight snapshot verify` looks at all of it"
    retryable = False
    problems: tuple[str, ...] = ()

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        super().__init__(f"{where}: {_listed(problems)}")
        self.problems = tuple(problems)


class Unavailable(LiveWeightError):
    """This machine cannot do what was asked."""

    remedy = "see the message"


class MissingExtra(Unavailable):
    """An optional dependency is not installed; the message is the pip line that helps."""

    code = "LW-501"
    remedy = "run the pip line in the message"
    feature: str = ""
    extra: str = ""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs: pip install 'liveweight[{extra}]'")
        self.feature, self.extra = feature, extra


class OutOfMemory(Unavailable):
    """Memory for an arena or a shadow could not be had."""

    code = "LW-502"
    remedy = "free memory, raise the limit, or use a mode that needs less"


class OutOfSpace(Unavailable):
    """A snapshot could not be written: no space, no permission, or a file system that failed; nothing of it exists."""

    code = "LW-503"
    remedy = "free space, prune older snapshots, or write elsewhere"
    retryable = True


class AddressUnusable(Unavailable):
    """An address that cannot be used from here: written wrong, in use, or not reachable."""

    code = "LW-504"
    remedy = (
        "give ipc:///path in a directory of yours, or tcp://host:port of this network, that nobody else uses"
    )


class Torn(LiveWeightError):
    """An in-place update failed: the rank holds a mixture of two versions and does not serve."""

    code = "LW-601"
    remedy = "run a full round, or restore a snapshot"
    retryable = True


class OutcomeUnknown(LiveWeightError):
    """The decision of a round could not be learned in time; the engines know it."""

    code = "LW-602"
    remedy = "ask the engines which version they serve, then go on or publish again"
    retryable = True


class RoundAborted(LiveWeightError):
    """The round was given up by its publisher; nothing of it is left."""

    code = "LW-603"
    remedy = "see why the publisher gave up; publish again"
    retryable = True


class EngineError(LiveWeightError):
    """The embedded engine cannot start, or cannot take a request."""

    remedy = "see the message"


class CheckpointInvalid(EngineError):
    """A model directory that cannot be served: files missing or damaged, an unknown architecture, wrong names or shapes."""

    code = "LW-701"
    remedy = "give a complete checkpoint directory of an architecture that `liveweight serve --help` names"


class EngineConfigInvalid(EngineError):
    """Settings of the engine that contradict each other, the model or the machine."""

    code = "LW-702"
    remedy = "change the setting that the message names"


class RequestInvalid(EngineError):
    """A request that no engine could answer: too long, or with parameters out of range."""

    code = "LW-703"
    remedy = "correct the parameter that the message names"


class QueueFull(EngineError):
    """As many requests wait as may wait; this one was not taken."""

    code = "LW-704"
    remedy = "send it again later, or raise --max-waiting"
    retryable = True


class EngineStopping(EngineError):
    """The engine is being stopped and takes no new requests."""

    code = "LW-705"
    remedy = "send the request to another engine"
    retryable = True


class RankLost(EngineError):
    """A rank of the engine died or stopped answering; its requests end with this error, and so does an engine that starts none again."""

    code = "LW-706"
    remedy = "start the engine again, unless it does so by itself (--restart-ranks); the rank's last output is in the log"
    retryable = True


class WeightsPending(EngineError):
    """The engine does not hold its version yet: its ranks are being started again, or it waits for a publisher."""

    code = "LW-707"
    remedy = "send it again in a moment, or to another engine; publish to one that waits for a publisher"
    retryable = True


class RoundFailed(LiveWeightError):
    """A round ended without a commit. Its code is that of its cause."""

    remedy = "see the cause; the engines serve what `serving` says"

    def __init__(
        self,
        cause: LiveWeightError,
        *,
        replica: str,
        rank: int | None,
        step: str,
        waited_s: float,
        serving: str | None,
        next_mode: str | None = None,
        answers: bool = True,
    ) -> None:
        """`next_mode`: the transfer mode of the next attempt, where another one failed here. `answers`: whether the replica answered; if it
        did not, `serving` is what it served at its last answer."""
        who = replica if rank is None else f"{replica}, rank {rank}"
        again = "a retry may help" if cause.retryable else "a retry will not help"
        again = again if next_mode is None else f"the next attempt uses {next_mode}"
        still = f"Still serving {serving or 'no version of ours'}; {again}"
        if not answers:
            known = (
                "what it serves is not known" if serving is None else f"it was last known to serve {serving}"
            )
            still = f"It does not answer; {known}; {again}"
        if isinstance(cause, Torn):
            still = "It serves nothing until a full round, or a snapshot, has healed it"
        super().__init__(f"{cause.code} {step} failed at {who} after {waited_s:.1f} s: {cause}. {still}.")
        self.cause, self.replica, self.rank, self.step = cause, replica, rank, step
        self.waited_s, self.serving, self.next_mode = waited_s, serving, next_mode
        self.answers = answers
        self.code, self.retryable = cause.code, cause.retryable or next_mode is not None

    def with_next_mode(self, name: str) -> RoundFailed:
        """The same, saying which transfer mode the next attempt uses."""
        return RoundFailed(
            self.cause,
            replica=self.replica,
            rank=self.rank,
            step=self.step,
            waited_s=self.waited_s,
            serving=self.serving,
            next_mode=name,
            answers=self.answers,
        )


def catalogue(root: type[LiveWeightError] = LiveWeightError) -> Iterator[type[LiveWeightError]]:
    """Every class that has a code of its own, in the tree's order. The operations page is checked against it."""
    for child in root.__subclasses__():
        if "code" in vars(child):
            yield child
        yield from catalogue(child)
