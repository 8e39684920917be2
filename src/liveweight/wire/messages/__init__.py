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
    Ask,
    Await,
    Commit,
    Committed,
    Compare,
    Compared,
    Describe,
    Described,
    Inquire,
    Open,
    Opened,
    Phase,
    Progress,
    Sleep,
    Slept,
    StandBack,
    Standing,
    Undo,
    Verdict,
    Verify,
    Voted,
    Wake,
)
from liveweight.wire.messages.rank import (
    Digest,
    Digested,
    Drop,
    Dropped,
    Failed,
    Join,
    Joined,
    Settled,
    Stage,
    Staged,
    Swapped,
    Verified,
)
from liveweight.wire.messages.ring import Again, Filled, Free, Leave, Subscribe, Subscribed
from liveweight.wire.messages.source import (
    Attach,
    Attached,
    Held,
    Hold,
    NotHeld,
    Release,
    Released,
    Survey,
    Surveyed,
    Wanted,
)
from liveweight.wire.messages.trainer import (
    Enlist,
    Enlisted,
    Froze,
    Learn,
    Outcome,
    Pending,
    Probe,
    Station,
    Stationed,
)

__all__ = [
    "ORDER",
    "Abort",
    "Aborted",
    "Again",
    "Ask",
    "Attach",
    "Attached",
    "Await",
    "Commit",
    "Committed",
    "Compare",
    "Compared",
    "Describe",
    "Described",
    "Digest",
    "Digested",
    "Drop",
    "Dropped",
    "Enlist",
    "Enlisted",
    "Failed",
    "Filled",
    "Free",
    "Froze",
    "Held",
    "Hold",
    "Inquire",
    "Join",
    "Joined",
    "Learn",
    "Leave",
    "Message",
    "NotHeld",
    "Open",
    "Opened",
    "Outcome",
    "Pending",
    "Phase",
    "Probe",
    "Progress",
    "Refusal",
    "Release",
    "Released",
    "Settled",
    "Sleep",
    "Slept",
    "Stage",
    "Staged",
    "StandBack",
    "Standing",
    "Station",
    "Stationed",
    "Subscribe",
    "Subscribed",
    "Survey",
    "Surveyed",
    "Swapped",
    "Undo",
    "Verdict",
    "Verified",
    "Verify",
    "Voted",
    "Wake",
    "Wanted",
]

Message: TypeAlias = (
    Refusal
    | Inquire
    | Standing
    | Describe
    | Described
    | Open
    | Opened
    | Await
    | Progress
    | Compare
    | Compared
    | Ask
    | Voted
    | Commit
    | Committed
    | Abort
    | Aborted
    | StandBack
    | Sleep
    | Wake
    | Slept
    | Undo
    | Verify
    | Verdict
    | Join
    | Joined
    | Stage
    | Staged
    | Verified
    | Failed
    | Drop
    | Dropped
    | Swapped
    | Settled
    | Digest
    | Digested
    | Attach
    | Attached
    | Subscribe
    | Subscribed
    | Filled
    | Free
    | Again
    | Leave
    | Hold
    | Held
    | NotHeld
    | Wanted
    | Release
    | Released
    | Survey
    | Surveyed
    | Enlist
    | Enlisted
    | Station
    | Stationed
    | Froze
    | Learn
    | Pending
    | Outcome
    | Probe
)
