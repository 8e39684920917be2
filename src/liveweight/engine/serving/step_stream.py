"""The step stream: the messages that the engine sends to every rank, in one order for all, and the ranks' answers.

A closed set of messages. An entry is carried out whole before the next one is read, so an entry holds for all that follow it and for
nothing before. A rank remembers its sequences by slot: the scheduler may send the next step without having seen the
tokens of the one before.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from liveweight.engine.config import EngineConfig
from liveweight.engine.serving.requests import LogprobsMode
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.messages.values import Fault, Offer


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class's name."""


def weights_text(version: Version) -> str:
    """The name of weights in steps and tokens: label, number if there is one, and digest."""
    return f"{version.label}@{'' if version.number is None else version.number}@{version.digest}"


def parts_of(weights: str) -> tuple[str, int | None, str]:
    """Label, number and digest in a name from `weights_text`. A label may have an `@`, the others have none."""
    named, _, digest = weights.rpartition("@")
    label, _, number = named.rpartition("@")
    return label, int(number) if number else None, digest


def content_of(weights: str) -> str:
    """The digest in a name from `weights_text`: the same for the same content, whatever its label."""
    return weights.rpartition("@")[2]


class Draw(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a sequence's tokens are drawn, as far as a rank must know.

    `seen` has the tokens of prompt and answer so far, each once, if there is a repetition penalty. Ranks add what they draw.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seen: tuple[int, ...]
    seed: int
    logprobs: int | None
    logprobs_mode: LogprobsMode
    routing: bool


class Fill(_Message, frozen=True):
    """Compute these tokens of a sequence, from position `start` on. `draw` comes with the first of them, and makes the slot new.

    `following` is the token after them; None: there is none yet, so draw it.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    following: int | None
    draw: Draw | None


class Next(_Message, frozen=True):
    """Go on with a slot from where the rank is: its last token, and its draft if it has one. `blocks` are added to its table."""

    slot: int
    blocks: tuple[int, ...]


class Step(_Message, frozen=True):
    """One run of the model over rows of many sequences."""

    number: int
    rows: tuple[Fill | Next, ...]


class Setup(_Message, frozen=True):
    """The first entry: the rank's number and configuration. `meeting` is the file over which the ranks find each other."""

    config: EngineConfig
    rank: int
    blocks: int
    context: int
    meeting: str


class Begin(_Message, frozen=True):
    """The second entry: what the weights that all ranks have loaded are called, and their tensors with digests."""

    version: Version
    manifest: Manifest


class Swap(_Message, frozen=True):
    """Swap shadow and live weights, or overwrite these: the commit, or undo, of the round with this epoch. Every step after it runs
    under the outcome."""

    epoch: int
    undo: bool
    timeout_s: float


class SaveImage(_Message, frozen=True):
    """Write all live weights into this directory, as a part of the snapshot with that id: their memory will be released."""

    directory: str
    snapshot: str
    timeout_s: float


class ReleaseMemory(_Message, frozen=True):
    """Release the memory of the weights, live and shadow, or of the cache, or of both. No step comes before it is restored."""

    weights: bool
    kv_cache: bool
    timeout_s: float


class RestoreMemory(_Message, frozen=True):
    """Read the released weights back from this offer, and compare them with their digests from before."""

    offer: Offer
    timeout_s: float


SleepEntry: TypeAlias = SaveImage | ReleaseMemory | RestoreMemory
"""An entry that puts a rank to sleep, or wakes it up."""

Entry: TypeAlias = Setup | Begin | Step | Swap | SleepEntry
"""What the engine sends. The end of the stream ends the rank."""


class Drawn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one row drew: its tokens, the chosen ones' logprobs, and alternatives (id, logprob) per token, where asked for.

    `drafted` counts guesses that were tried. `routing` has the experts of the row's computed tokens that stay, from its first on.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    drafted: int = 0
    routing: bytes = b""


class Loaded(_Message, frozen=True):
    """A rank has read its share of the checkpoint: what it holds where, and the digests of that, 16 bytes per placement."""

    layout: Layout
    lanes: bytes


class RankReady(_Message, frozen=True):
    """A rank has its weights, which have a name, and its cache."""

    rank: int
    weights: str
    attention: str


class StepDone(_Message, frozen=True):
    """A rank has carried out a step, under these weights. Rank 0 sends what its rows drew, in their order; the other ranks send no rows."""

    number: int
    weights: str
    rows: tuple[Drawn, ...]


class SwapDone(_Message, frozen=True):
    """The outcome of a swap is known to the rank; it holds these weights, whole. `torn`: it holds none that may serve, and why."""

    weights: str
    torn: str | None = None


class SleepStepDone(_Message, frozen=True):
    """A rank has carried out a SleepEntry; or could not, and why: then it is as before, or still asleep."""

    weights: str
    size_bytes: int = 0
    fault: Fault | None = None


class RankFailed(_Message, frozen=True):
    """A rank's last message: why it ends."""

    fault: Fault


Answer: TypeAlias = Loaded | RankReady | StepDone | SwapDone | SleepStepDone | RankFailed
"""What a rank sends."""
