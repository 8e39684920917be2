"""The torn demo: two engines, the same stream of requests, and on each a trainer that is killed in the middle of an update.

Left, the trainer writes the update in place, bucket by bucket; right, the update is a round of liveweight. Owns the order of events and the
counting. Messages synchronise every step; the judge sees every token that clients received, and nothing else.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.engine.text.tokenizer import Tokenizer
from liveweight.errors import MessageInvalid
from liveweight.lab.torn_demo import engine_process, in_place_update
from liveweight.lab.torn_demo.answer_counts import AnswerCounts
from liveweight.lab.torn_demo.clients import ClientAnswer, ClientStream
from liveweight.lab.torn_demo.engine_process import SideConfig
from liveweight.lab.torn_demo.in_place_update import InPlaceConfig
from liveweight.lab.torn_demo.judge import Kind, TokenJudge
from liveweight.lab.torn_demo.processes import ChildMessage, Served, TornProcess
from liveweight.lab.torn_demo.publishing_trainer import PublishConfig
from liveweight.lab.torn_demo.result import LABEL, PARTS, SideResult, TornResult
from liveweight.server.client import EngineClient
from liveweight.spec.deadline import Deadline

TP = 2
START_S = 240.0
STEP_S = 120.0
ENGINE_END_S = 20.0
POLL_S = 0.1
STAGE_S = 4.0
"""How long the right side's ranks take to stage, so that the trainer dies in the middle of staging and not after it."""
DYING_S, LEASE_S = 3.0, 0.5
"""How long the killed trainer's round may take: the engine gives the round up this long, plus a margin, after it was opened."""

Side: TypeAlias = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class TornSettings:
    """`paused`: the left engine is paused while buckets are written. `kill` False: both updates are completed."""

    size: Literal["tiny", "small"] = "tiny"
    clients: int = 4
    tokens: int = 64
    answers: int = 2
    buckets: int = 8
    paused: bool = True
    kill: bool = True
    seed: int = 0


class TornView(Protocol):
    """Shows the demo. `note` is called by the demo's thread, `judged` by the judge's."""

    def note(self, side: Side | None, text: str) -> None:
        """An event on one side, or on both (None)."""

    def judged(self, side: str, texts: Sequence[str], kinds: Sequence[Kind]) -> None:
        """An answer was replayed: the text and the kind of every token."""


def run_torn(settings: TornSettings, view: TornView, *, publisher_main: Callable[[int], None]) -> TornResult:
    """Run the demo. `publisher_main` is the right side's trainer: publishing_trainer.main with `lw.Publisher`, importable by its name.

    All processes have exited on return, also after an error.
    """
    import torch

    torch.set_num_threads(1)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lw-torn-")))
        demo = _Demo(settings, view, publisher_main, directory, stack)
        demo.start()
        demo.update()
        if settings.kill:
            demo.recover()
        return demo.finish()


class _Demo:
    """One run. Its public methods are called in order."""

    def __init__(
        self,
        settings: TornSettings,
        view: TornView,
        publisher_main: Callable[[int], None],
        directory: Path,
        stack: ExitStack,
    ) -> None:
        self._settings, self._view, self._publisher_main = settings, view, publisher_main
        self._directory, self._stack = directory, stack
        self._old, self._new = (
            _checkpoint(directory / name, settings, n) for n, name in enumerate(("old", "new"))
        )
        self._tokenizer = Tokenizer.load(self._old)

    def start(self) -> None:
        """Start both engines, their trainers and clients, and wait for the clients' first answers."""
        settings, deadline = self._settings, Deadline.after(START_S)
        self._view.note(None, f"starting two engines of {TP} ranks on the same checkpoint")
        engines = {side: self._engine(side) for side in SIDES}
        self._trainers = {side: self._trainer(side, dies=settings.kill) for side in SIDES}
        counts = self._counts = self._stack.enter_context(
            AnswerCounts(TokenJudge(self._old, self._new), self._judged)
        )
        self._served = {side: _served(engine.receive("ready", deadline)) for side, engine in engines.items()}
        self._streams = {
            side: self._stack.enter_context(
                ClientStream(
                    f"the {side} engine",
                    self._served[side].url,
                    clients=settings.clients,
                    tokens=settings.tokens,
                    finished=lambda answer, side=side: counts.put((side, answer)),  # type: ignore[misc]
                )
            )
            for side in SIDES
        }
        self._view.note(None, f"{settings.clients} clients stream from each, over HTTP")
        self._until(1)

    def update(self) -> None:
        """Let the trainers update while requests run. Each is killed in the middle of it, or completes it."""
        settings, deadline = self._settings, Deadline.after(STEP_S)
        for trainer in self._trainers.values():
            trainer.receive("ready", deadline)
        for stream in self._streams.values():
            stream.begin(1)
        how = (
            "pauses the engine and writes buckets in place" if settings.paused else "writes buckets in place"
        )
        self._view.note("left", f"the trainer {how}")
        self._view.note("right", "the trainer publishes")
        for side, trainer in self._trainers.items():
            trainer.go(self._served[side])
        if not settings.kill:
            self._receive_done("the update is done")
            return
        for side, trainer in self._trainers.items():
            reached = trainer.receive("middle", deadline).text
            trainer.kill()
            self._view.note(side, f"kill -9 of the trainer; {reached}")
            self._streams[side].begin(2)
            if side == "left" and settings.paused:
                EngineClient(self._served[side].url).resume(deadline)
                self._view.note(side, "a watchdog resumes the engine, which cannot tell that it is torn")

    def recover(self) -> None:
        """Let clients ask after the kill, then let new trainers update."""
        self._trainers = {side: self._trainer(side, dies=False) for side in SIDES}
        self._until(self._settings.answers)
        self._view.note("right", f"the dead trainer's round: {self._until_no_round()}")
        deadline = Deadline.after(STEP_S)
        for side, trainer in self._trainers.items():
            trainer.receive("ready", deadline)
            trainer.go(self._served[side])
        self._receive_done("a successor's update is done")

    def _receive_done(self, note: str) -> None:
        for side, trainer in self._trainers.items():
            trainer.receive("done", Deadline.after(STEP_S))
            self._streams[side].begin(3)
            self._view.note(side, note)

    def finish(self) -> TornResult:
        """Let clients ask once more, then count every token."""
        self._until(1)
        deadline = Deadline.after(STEP_S)
        for stream in self._streams.values():
            stream.finish(deadline)
        self._counts.finish(deadline)
        return TornResult(left=self._result("left", deadline), right=self._result("right", deadline))

    def _judged(self, side: str, answer: ClientAnswer, kinds: Sequence[Kind]) -> None:
        self._view.judged(side, [_token_text(self._tokenizer, token) for token in answer.tokens], kinds)

    def _result(self, side: Side, deadline: Deadline) -> SideResult:
        version = EngineClient(self._served[side].url).weights(deadline)["version"]
        return SideResult(
            parts={part: self._counts.counts[side, mark] for mark, part in enumerate(PARTS)},
            streamed=self._streams[side].streamed,
            serving="initial" if version is None else str(version["label"]),
        )

    def _until(self, answers: int) -> None:
        deadline = Deadline.after(STEP_S)
        for stream in self._streams.values():
            stream.until(answers, deadline)

    def _until_no_round(self) -> str:
        """Wait until the right engine has given the dead trainer's round up. Returns the round's outcome."""
        deadline, client, pause = (
            Deadline.after(STEP_S),
            EngineClient(self._served["right"].url),
            threading.Event(),
        )
        while (weights := client.weights(deadline))["round"] is not None:
            deadline.check("the right engine to give up the dead trainer's round")
            pause.wait(POLL_S)
        return str(weights["rounds"][-1]["outcome"])

    def _engine(self, side: Side) -> TornProcess:
        updates = None
        if side == "right":
            size_bytes = sum(path.stat().st_size for path in self._old.glob("*.safetensors"))
            updates = Updates(
                address=f"ipc://{self._directory}/engine.sock",
                secret_file=str(self._directory / "secret"),
                pace_bytes_per_s=size_bytes / TP / STAGE_S,
            )
        # No prefix cache: after writes in place it would return keys and values of the old weights.
        config = EngineConfig(
            model=str(self._old),
            tp=TP,
            prefix_cache=False,
            updates=updates,
            hooks=(in_place_update.HOOK,) if side == "left" else (),
        )
        process = TornProcess(
            f"the {side} engine", engine_process.main, SideConfig(engine=config), grace_s=ENGINE_END_S
        )
        return self._stack.enter_context(process)

    def _trainer(self, side: Side, *, dies: bool) -> TornProcess:
        name = f"the {side} trainer"
        if side == "left":
            buckets = self._settings.buckets
            write = InPlaceConfig(
                checkpoint=str(self._new),
                ranks=TP,
                buckets=buckets,
                paused=self._settings.paused,
                stop_after=buckets // 2 if dies else None,
            )
            return self._stack.enter_context(TornProcess(name, in_place_update.trainer_main, write))
        publish = PublishConfig(
            checkpoint=str(self._new),
            directory=str(self._directory / "trainer"),
            secret_file=str(self._directory / "secret"),
            label=LABEL,
            timeout_s=DYING_S if dies else STEP_S,
            lease_s=LEASE_S if dies else 10.0,
            stops=dies,
        )
        return self._stack.enter_context(TornProcess(name, self._publisher_main, publish))


def _checkpoint(directory: Path, settings: TornSettings, number: int) -> Path:
    """The old version has seed 2n, the new one 2n + 1: every weight but the norms' differs."""
    init_model(directory, SIZES["qwen3"][settings.size], seed=2 * settings.seed + number)
    return directory


def _served(message: ChildMessage) -> Served:
    if message.served is None:
        raise MessageInvalid("a ready engine must send its URL")
    return message.served


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, without line breaks."""
    text = tokenizer.bytes_of(token).decode(errors="replace").replace("\ufffd", "·")
    return "".join(letter if letter.isprintable() else "·" for letter in text)
