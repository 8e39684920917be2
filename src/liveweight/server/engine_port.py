"""The engine as HTTP sees it: a small port, so that its contract can be tested without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from liveweight.engine.config import EngineConfig
from liveweight.engine.models.spec import ModelSpec
from liveweight.engine.serving.requests import Sampling, Sink
from liveweight.engine.serving.sleeping import SleepResult, Tag
from liveweight.engine.status import PauseMode, Pausing, Status
from liveweight.engine.text import Tokenizer
from liveweight.engine.updates.leader_client import UpdateStatus
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult
from liveweight.engine.updates.verifying import VerificationRequest, VerificationResult
from liveweight.errors import LiveWeightError
from liveweight.spec.manifest import Version


class EngineControls(Protocol):
    """What those who run a replica can see of it and tell it. For any thread but the event loop's: all of them may wait."""

    @property
    def address(self) -> str | None:
        """Where publishers reach its leader; None without live updates."""

    @property
    def paused(self) -> Pausing:
        """Whether requests run, still finish, or stand still. Waits for nothing."""

    def update_status(self) -> UpdateStatus:
        """What it serves, and how its rounds are and went. WrongState without live updates."""

    def undo(self, timeout_s: float) -> Version | None:
        """Go back to the version before; what serves then. WrongState without one, RoundOpen while a round is open."""

    def update_weights(self, wish: RequestedVersion) -> UpdateResult:
        """Take it to a version of its source. WrongState without one; RoundFailed: it serves what it served."""

    def verify(self, question: VerificationRequest) -> VerificationResult:
        """Digest what all ranks hold now, and compare it. WrongState without live updates, ManifestMismatch for unknown names,
        WeightsExchanged where rounds left no time for it, DeadlineExceeded with the ranks that did not answer."""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Let requests stand still; new ones wait. DeadlineExceeded if they do not yet: they will. Twice is fine."""

    def resume(self) -> None:
        """Let requests run again."""

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Give the memory of these back; requests stand still. RoundOpen while a round is open, WrongState while another such call runs."""

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Take it again; requests go on when nothing is asleep any more. Errors leave it asleep."""

    def drop_cache(self, timeout_s: float) -> int:
        """Give the cache's memory back for a moment; requests that run are filled again. So many bytes. WrongState while it sleeps."""

    def abort_requests(self, requests: Sequence[int] | None = None) -> int:
        """End these requests (None: all, waiting ones too) with what they have; how many of them there were."""


class EnginePort(EngineControls, Protocol):
    """One replica. Every method may be called from any thread; but for `stop` and the controls none waits for a step."""

    config: EngineConfig
    spec: ModelSpec
    name: str
    start: Version
    context: int
    vocab: int
    tokenizer: Tokenizer

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Sink) -> int:
        """Take a request; its number. RequestInvalid, QueueFull, EngineStopping or RankLost if it is not taken."""

    def cancel(self, request: int) -> None:
        """End a request, if it has not ended; its sink hears a last piece with `abort`."""

    def status(self) -> Status:
        """How it is now."""

    def on_failure(self, callback: Callable[[LiveWeightError], None]) -> None:
        """Call back once when a rank is lost, on any thread; at once, if one was."""

    def stop(self, timeout_s: float = 0.0) -> None:
        """Take no more, let what runs end for so long, abort the rest, end every process. Waits for it; twice is fine."""
