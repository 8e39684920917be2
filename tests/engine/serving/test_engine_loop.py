"""The engine loop with a rank that checks its entries: steps cross swaps, and no page of other weights is taken for one of these.

The rank is the real runner over cells that remember which weights wrote them. A token that was drawn over cells of other weights is
another token, and its answer must say so.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liveweight.engine.rank.attention import AttentionPlan
from liveweight.engine.rank.slots import Slots
from liveweight.engine.rank.step_runner import StepRunner
from liveweight.engine.serving.counters import SchedulerLimits
from liveweight.engine.serving.engine_loop import EngineLoop
from liveweight.engine.serving.rank_processes import Done
from liveweight.engine.serving.requests import Delta, Sampling
from liveweight.engine.serving.scheduler import Scheduler
from liveweight.engine.serving.sequence import Sequence
from liveweight.engine.serving.step_stream import Step, StepDone, Swap, SwapDone
from liveweight.engine.updates.live_updates import DecisionInbox
from liveweight.errors import Torn
from liveweight.rounds.boundary import Decision
from liveweight.wire.messages.values import KvPolicy, RoundId
from tests.support.engine.oracle import EOS, VOCAB, Cells, Oracle, Silent, digest

SALT, MIXED = 13, 500_009
LONGEST = 20
VERSIONS = 2
"""They come back, as after an undo: pages of before may be found again."""


def drawn_by(version: int, tokens: list[int]) -> int:
    """What these weights draw after those tokens, if they have computed all of them."""
    return (digest(tokens) + SALT * version) % VOCAB


class VersionedCells(Cells):
    """Cells that know which weights wrote them."""

    version = 0

    def attend(
        self, plan: AttentionPlan, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        marked = key + 1000 * self.version
        super().attend(plan, layer, query, marked, value)
        size, seen = self.block_tokens, []
        for start, end, table in zip(plan.row_starts[:-1], plan.row_starts[1:], plan.tables, strict=True):
            for at in range(start, end):
                cells = [self.cells[table[p // size]][p % size] for p in range(int(plan.positions[at]) + 1)]
                pure = all(cell // 1000 == self.version for cell in cells)
                tokens = [cell % 1000 for cell in cells]
                seen.append(digest(tokens) + SALT * self.version + (0 if pure else MIXED))
        return torch.tensor(seen, dtype=torch.float64)


@dataclasses.dataclass
class ReceivedAnswer:
    """What a client got: tokens, the weights they came from, and whether the answer said by then that keys of others were used."""

    prompt: list[int]
    tokens: list[tuple[int, str, bool]] = dataclasses.field(default_factory=list)
    last: Delta | None = None

    def take(self, delta: Delta) -> None:
        assert self.last is None
        self.tokens += [(token.id, token.weights, delta.reused_kv) for token in delta.tokens]
        if delta.last:
            self.last = delta


class Stage:
    """An engine loop whose ranks are one runner in this thread, and whose waits are the test's turns."""

    def __init__(
        self, *, policy: KvPolicy, luck: float | None, depth: int, blocks: int, in_place: bool = False
    ) -> None:
        limits = SchedulerLimits(
            blocks=blocks, block_tokens=4, context=32, max_running=4, max_waiting=50, batch_tokens=16,
            width=1 if luck is None else 2,
        )  # fmt: skip
        self.cells = VersionedCells(limits.blocks, limits.block_tokens, limits.context)
        self.scheduler = Scheduler(limits, weights="0 0", ends=frozenset({EOS}))
        model: Any = Oracle(luck)
        cells: Any = self.cells
        slots = Slots(limits.max_running, context=limits.context, block_tokens=limits.block_tokens)
        self.runner = StepRunner(model, cells, slots, weights="0 0", reports=True)
        self.inbox, self.policy = DecisionInbox(), policy
        self.entries: deque[Step | Swap] = deque()
        self.answers: list[ReceivedAnswer] = []
        self.rounds = self.crossed = 0
        self.turn: Callable[[], list[tuple[Done, ...]]] = list
        ranks: Any = self
        self.engine_loop = EngineLoop(
            self.scheduler,
            ranks,
            self.inbox,
            depth=depth,
            kv_policy="recompute",
            in_place=in_place,
            served=lambda: None,
        )

    # What an engine loop calls on its ranks.

    def send(self, entry: Step | Swap) -> None:
        self.crossed += isinstance(entry, Step) and any(isinstance(e, Swap) for e in self.entries)
        self.entries.append(entry)

    def wait(self) -> list[tuple[Done, ...]]:
        return self.turn()

    def close(self, *, at_once: bool) -> None:
        assert not at_once, self.engine_loop.fault

    # What the test may do in a turn.

    def ask(self, prompt: list[int], count: int) -> None:
        answer = ReceivedAnswer(prompt)
        self.answers.append(answer)
        sampling = Sampling(max_tokens=count, temperature=0.0)
        self.scheduler.add(Sequence(len(self.answers), list(prompt), sampling, answer.take, Silent()))

    def ask_on(self, which: int, count: int) -> None:
        """Take an answer up where it is."""
        if self.answers:
            answer = self.answers[which % len(self.answers)]
            self.ask([*answer.prompt, *(token for token, _, _ in answer.tokens)][:LONGEST], count)

    def decide(self) -> None:
        self.rounds += 1
        round_id = RoundId(boot="b", epoch=self.rounds, publisher="p")
        self.inbox.put(round_id, Decision(self.rounds, False, 1.0, self.policy))

    def tear(self) -> list[tuple[Done, ...]]:
        """Let a swap, the oldest entry, leave a mixture."""
        assert isinstance(self.entries.popleft(), Swap)
        return [(SwapDone("", "told to tear"),)]

    def carry_out(self, *, keep: bool) -> list[tuple[Done, ...]]:
        """Let the rank carry out the oldest entry; a swap stays, or goes back."""
        if not self.entries:
            return []
        entry = self.entries.popleft()
        if isinstance(entry, Swap):
            if keep:
                self.cells.version = (self.cells.version + 1) % VERSIONS
                self.runner.weights = f"{self.cells.version} {self.cells.version}"
            return [(SwapDone(self.runner.weights),)]
        results: list[StepDone] = []
        self.runner.run(entry, results.append)
        return [(results[0],)]


def play(stage: Stage, actions: list[tuple[str, Any]]) -> None:
    """The actions, one in each turn of the engine loop; then everything to its end."""
    left = deque(actions)

    def turn() -> list[tuple[Done, ...]]:
        if not left:
            done = stage.carry_out(keep=True)
            stage.engine_loop.closing = not done and not stage.engine_loop.busy()
            return done
        action, given = left.popleft()
        if action == "ask":
            stage.ask(*given)
        elif action == "ask on":
            stage.ask_on(*given)
        elif action == "decide":
            stage.decide()
        elif action == "do":
            return list(given() or ())
        else:
            return stage.carry_out(keep=given)
        return []

    stage.turn = turn
    stage.engine_loop.run(lambda: None)
    assert stage.engine_loop.fault is None


def assert_told(stage: Stage) -> None:
    """Every answer is whole; each token is the one of the weights it names, unless the answer says that it used others' keys."""
    for answer in stage.answers:
        assert answer.last is not None
        assert answer.last.fault is None
        tokens = list(answer.prompt)
        for token, weights, reused in answer.tokens:
            if not reused:
                assert token == drawn_by(int(weights.split()[0]), tokens)
            tokens.append(token)
        if stage.policy == "recompute":
            assert not any(reused for _, _, reused in answer.tokens)
    assert stage.scheduler.pool.free == stage.scheduler.limits.blocks


def some_actions(dice: random.Random) -> list[tuple[str, Any]]:
    """Many requests with few beginnings, and swaps in between, most of which stay."""
    actions: list[tuple[str, Any]] = []
    for _ in range(120):
        action = dice.choice(["ask", "ask on", "decide", *["carry out"] * 6])
        if action == "ask on":
            actions.append((action, (dice.randrange(100), dice.randint(1, 8))))
        elif action == "ask":
            prompt = [1 + index % 2 for index in range(dice.choice([3, 9, 12, 18]))]
            actions.append(("ask", (prompt, dice.randint(1, 12))))
        else:
            actions.append((action, dice.random() < 0.8))
    return actions


@pytest.mark.parametrize("policy", ["reuse", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [8, 12, 40])
@pytest.mark.parametrize("luck", [None, 0.6])
def test_whatever_crosses_a_swap_names_its_weights(
    policy: KvPolicy, luck: float | None, depth: int, blocks: int
) -> None:
    crossed = 0
    for seed in range(12):
        stage = Stage(policy=policy, luck=luck, depth=depth, blocks=blocks)
        play(stage, some_actions(random.Random(seed)))
        assert_told(stage)
        crossed += stage.crossed
    assert (crossed > 0) == (policy == "reuse")


def test_under_reuse_the_next_step_waits_at_the_ranks_and_under_recompute_none_does() -> None:
    crossed = {}
    for policy in ("reuse", "recompute"):
        stage = Stage(policy=policy, luck=None, depth=2, blocks=40)
        go = ("carry out", True)
        play(stage, [("ask", ([1, 2, 3], 16)), go, go, ("decide", None), go, go, go])
        assert_told(stage)
        crossed[policy] = stage.crossed
    assert crossed["reuse"] > 0
    assert crossed["recompute"] == 0


def test_requests_that_come_while_a_round_heals_a_torn_engine_wait_for_its_outcome() -> None:
    stage = Stage(policy="reuse", luck=None, depth=2, blocks=40, in_place=True)

    def refused() -> None:
        assert stage.engine_loop.reported_state == "torn"
        with pytest.raises(Torn, match="told to tear"):
            stage.engine_loop.check_not_torn()

    def taken() -> None:
        stage.engine_loop.check_not_torn()
        stage.ask([1, 2, 3], 4)

    healing = [("do", refused), ("decide", None), ("do", taken)]
    play(stage, [("decide", None), ("do", stage.tear), *healing, ("do", stage.tear), *healing])
    assert [answer.last and answer.last.finish for answer in stage.answers] == ["abort", "length"]
    assert [len(answer.tokens) for answer in stage.answers] == [0, 4]
    assert (stage.engine_loop.reported_state, stage.crossed) == ("stopped", 0)
    assert_told(stage)
