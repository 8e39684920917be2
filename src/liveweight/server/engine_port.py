"""The engine as HTTP sees it: a small port, so that its contract can be tested without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from liveweight.engine.config import EngineConfig
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.serving.requests import Sampling, Sink
from liveweight.engine.serving.sleeping import SleepResult, Tag
from liveweight.engine.status import PauseMode, Pausing, Status
from liveweight.engine.text import Tokenizer
from liveweight.engine.updates.leader_client import UpdateStatus
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult
from liveweight.engine.updates.verifying import VerificationRequest, VerificationResult
from liveweight.errors import LiveWeightError
from liveweight.spec.manifest import Version
from liveweight.spec.version_demand import VersionDemand


class EngineControls(Protocol):
    """What operators can see of a replica and do to it. For any thread but the event loop's: every method may wait."""

    @property
    def address(self) -> str | None:
        """Where publishers reach its leader; None without live updates."""

    @property
    def paused(self) -> Pausing:
        """Whether requests run, still finish, or are paused. Returns at once."""

    def update_status(self) -> UpdateStatus:
        """The version served, and present and past rounds. WrongState without live updates."""

    def undo(self, timeout_s: float) -> Version | None:
        """Go back to the version before; what serves then. WrongState without one, RoundOpen while a round is open."""

    def update_weights(self, request: RequestedVersion) -> UpdateResult:
        """Update to a version of its source. WrongState without a source; after RoundFailed it serves the version it had."""

    def verify(self, request: VerificationRequest) -> VerificationResult:
        """Digest what all ranks hold now, and compare it. WrongState without live updates, ManifestMismatch for unknown names,
        WeightsExchanged where rounds left no time for it, DeadlineExceeded with the ranks that did not answer."""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Pause requests; new ones wait. DeadlineExceeded if requests still run: the pause comes into effect later. Twice is fine."""

    def resume(self) -> None:
        """Let requests run again."""

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Release the memory of these; requests pause. RoundOpen while a round is open, WrongState while another such call runs."""

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Restore it; requests go on when nothing is asleep any more. After an error it is still asleep."""

    def drop_cache(self, timeout_s: float) -> int:
        """Release the cache's memory for a moment; running requests are filled again. Returns the bytes. WrongState while it sleeps."""

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

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        sink: Sink,
        demand: VersionDemand | None = None,
    ) -> int:
        """Take a request; its number. RequestInvalid, QueueFull, EngineStopping, RankLost or VersionNotServed if it is not taken."""

    def check_demand(self, demand: VersionDemand | None) -> None:
        """Raise VersionNotServed if the present version does not meet the demand."""

    def cancel(self, request: int) -> None:
        """End a request, if it has not ended; its sink gets a last piece with `abort`."""

    def status(self) -> Status:
        """How it is now."""

    def on_failure(self, callback: Callable[[LiveWeightError], None]) -> None:
        """Call back once when a rank is lost, on any thread; at once, if one was."""

    def stop(self, timeout_s: float = 0.0) -> None:
        """Take no more, let what runs end for so long, abort the rest, end every process. Waits for it; twice is fine."""
