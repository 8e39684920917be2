"""The closed set of messages of a round: between publisher and leader, leader and ranks, ranks and source,
and among the ranks of a trainer.

Every message but a notification is answered by exactly one of the replies that its docstring names, or by `Refusal`.
Durations travel, clock times never do. Weights never pass through here.
"""

from __future__ import annotations

from typing import TypeAlias

from liveweight.wire.messages.body import Refusal
from liveweight.wire.messages.publisher import (
    ORDER,
    Abort,
    Aborted,
    Commit,
    Committed,
    Compare,
    Compared,
    Describe,
    Described,
    GetReplicaState,
    MarkBehind,
    Open,
    Opened,
    Phase,
    Progress,
    ReplicaState,
    RequestVote,
    Sleep,
    SleepNoted,
    Undo,
    Verdict,
    Verify,
    Vote,
    WaitFor,
    Wake,
)
from liveweight.wire.messages.rank import (
    DigestLive,
    DropShadow,
    Join,
    Joined,
    LiveDigests,
    Settled,
    ShadowDropped,
    Stage,
    Staged,
    StagingFailed,
    Swapped,
    Verified,
)
from liveweight.wire.messages.ring import (
    BucketFilled,
    RepackBucket,
    SegmentFree,
    Subscribe,
    Subscribed,
    Unsubscribe,
)
from liveweight.wire.messages.source import (
    AcquireReadLease,
    Attach,
    Attached,
    GetShardLayout,
    MemoryWanted,
    ReadLeaseGranted,
    ReadLeaseRefused,
    ReadLeaseReleased,
    ReleaseReadLease,
    ShardLayout,
)
from liveweight.wire.messages.trainer import (
    AnnounceShards,
    GetOutcome,
    Outcome,
    OutcomePending,
    Probe,
    RankRegistered,
    RegisterRank,
    ShardsAccepted,
    ShardsFrozen,
)

__all__ = [
    "ORDER",
    "Abort",
    "Aborted",
    "AcquireReadLease",
    "AnnounceShards",
    "Attach",
    "Attached",
    "BucketFilled",
    "Commit",
    "Committed",
    "Compare",
    "Compared",
    "Describe",
    "Described",
    "DigestLive",
    "DropShadow",
    "GetOutcome",
    "GetReplicaState",
    "GetShardLayout",
    "Join",
    "Joined",
    "LiveDigests",
    "MarkBehind",
    "MemoryWanted",
    "Message",
    "Open",
    "Opened",
    "Outcome",
    "OutcomePending",
    "Phase",
    "Probe",
    "Progress",
    "RankRegistered",
    "ReadLeaseGranted",
    "ReadLeaseRefused",
    "ReadLeaseReleased",
    "Refusal",
    "RegisterRank",
    "ReleaseReadLease",
    "RepackBucket",
    "ReplicaState",
    "RequestVote",
    "SegmentFree",
    "Settled",
    "ShadowDropped",
    "ShardLayout",
    "ShardsAccepted",
    "ShardsFrozen",
    "Sleep",
    "SleepNoted",
    "Stage",
    "Staged",
    "StagingFailed",
    "Subscribe",
    "Subscribed",
    "Swapped",
    "Undo",
    "Unsubscribe",
    "Verdict",
    "Verified",
    "Verify",
    "Vote",
    "WaitFor",
    "Wake",
]

Message: TypeAlias = (
    Refusal
    | GetReplicaState
    | ReplicaState
    | Describe
    | Described
    | Open
    | Opened
    | WaitFor
    | Progress
    | Compare
    | Compared
    | RequestVote
    | Vote
    | Commit
    | Committed
    | Abort
    | Aborted
    | MarkBehind
    | Sleep
    | Wake
    | SleepNoted
    | Undo
    | Verify
    | Verdict
    | Join
    | Joined
    | Stage
    | Staged
    | Verified
    | StagingFailed
    | DropShadow
    | ShadowDropped
    | Swapped
    | Settled
    | DigestLive
    | LiveDigests
    | Attach
    | Attached
    | Subscribe
    | Subscribed
    | BucketFilled
    | SegmentFree
    | RepackBucket
    | Unsubscribe
    | AcquireReadLease
    | ReadLeaseGranted
    | ReadLeaseRefused
    | MemoryWanted
    | ReleaseReadLease
    | ReadLeaseReleased
    | GetShardLayout
    | ShardLayout
    | RegisterRank
    | RankRegistered
    | AnnounceShards
    | ShardsAccepted
    | ShardsFrozen
    | GetOutcome
    | OutcomePending
    | Outcome
    | Probe
)
