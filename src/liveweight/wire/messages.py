"""The closed set of messages of a round: between publisher and leader, leader and ranks, ranks and source.

Every message but a notification is answered by exactly one of the replies that its docstring names, or by `Refusal`.
Durations travel, clock times never do. Weights never pass through here.
"""

from __future__ import annotations

from typing import TypeAlias

from liveweight.wire.body import Refusal
from liveweight.wire.publisher_messages import (
    ORDER,
    Abort,
    Aborted,
    Ask,
    Await,
    Commit,
    Committed,
    Describe,
    Described,
    Inquire,
    Open,
    Opened,
    Phase,
    Progress,
    Standing,
    Undo,
    Voted,
)
from liveweight.wire.rank_messages import (
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
from liveweight.wire.source_messages import Attach, Attached

__all__ = [
    "ORDER",
    "Abort",
    "Aborted",
    "Ask",
    "Attach",
    "Attached",
    "Await",
    "Commit",
    "Committed",
    "Describe",
    "Described",
    "Drop",
    "Dropped",
    "Failed",
    "Inquire",
    "Join",
    "Joined",
    "Message",
    "Open",
    "Opened",
    "Phase",
    "Progress",
    "Refusal",
    "Settled",
    "Stage",
    "Staged",
    "Standing",
    "Swapped",
    "Undo",
    "Verified",
    "Voted",
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
    | Ask
    | Voted
    | Commit
    | Committed
    | Abort
    | Aborted
    | Undo
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
    | Attach
    | Attached
)
