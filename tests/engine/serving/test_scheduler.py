"""The scheduler with a rank that checks its entries: every query must see exactly its own sequence, whatever was shared,
taken back, guessed or ended.

The rank is the real runner over a model whose next token is a function of all tokens before, read back from the pages. A page that was
reused too early, or found under a wrong key, gives another token.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.engine.rank.slots import Slots
from liveweight.engine.rank.step_runner import StepRunner
from liveweight.engine.serving.counters import SchedulerLimits
from liveweight.engine.serving.requests import Sampling
from liveweight.engine.serving.scheduler import Scheduler
from liveweight.engine.serving.sequence import Sequence
from liveweight.engine.serving.step_stream import Draw, Fill, Step, StepDone
from liveweight.errors import QueueFull, RankLost, RequestInvalid
from tests.support.engine.oracle import EOS, Answer, Cells, Oracle, Silent, continued


class World:
    """A scheduler, a rank, and the stream between them, with as many steps in flight as the test lets be."""

    def __init__(self, *, luck: float | None = None, depth: int = 2, **limits: Any) -> None:
        sizes: dict[str, Any] = {
            "blocks": 12,
            "block_tokens": 4,
            "context": 40,
            "max_running": 4,
            "max_waiting": 50,
            "batch_tokens": 16,
            "width": 1 if luck is None else 2,
        }
        self.limits = SchedulerLimits(**(sizes | limits))
        self.scheduler = Scheduler(self.limits, weights="w", ends=frozenset({EOS}))
        cells: Any = Cells(self.limits.blocks, self.limits.block_tokens, self.limits.context)
        model: Any = Oracle(luck)
        slots = Slots(
            self.limits.max_running, context=self.limits.context, block_tokens=self.limits.block_tokens
        )
        self.runner = StepRunner(model, cells, slots, weights="w", reports=True)
        self.depth = depth
        self.stream: deque[Step] = deque()
        self.numbers = 0

    def ask(self, prompt: list[int], count: int, **more: Any) -> tuple[int, Answer]:
        self.numbers += 1
        answer = Answer()
        sampling = Sampling(max_tokens=count, temperature=0.0, **more)
        self.scheduler.add(Sequence(self.numbers, list(prompt), sampling, answer.take, Silent()))
        return self.numbers, answer

    def send(self) -> bool:
        """Let the scheduler send one step, if it may and can."""
        if self.scheduler.in_flight >= self.depth:
            return False
        step = self.scheduler.schedule()
        if step is not None:
            self.stream.append(step)
        return step is not None

    def answer(self) -> bool:
        """Let the rank carry out the oldest step."""
        if not self.stream:
            return False
        results: list[StepDone] = []
        self.runner.run(self.stream.popleft(), results.append)
        (result,) = results
        for sink, delta in self.scheduler.done(result.number, result.weights, result.rows):
            sink(delta)
        return True

    def finish(self) -> None:
        """Until nothing is left to do."""
        while self.send() or self.answer():
            pass


def assert_everything_came_back(world: World) -> None:
    assert (world.scheduler.running, world.scheduler.waiting) == (0, 0)
    assert world.scheduler.pool.free == world.limits.blocks


prompts = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    luck=st.sampled_from([None, 0.0, 0.6, 1.0]),
    depth=st.sampled_from([1, 2]),
    blocks=st.sampled_from([8, 12, 40]),
    batch_tokens=st.sampled_from([8, 16, 64]),
    caching=st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    data: st.DataObject, luck: float | None, depth: int, blocks: int, batch_tokens: int, caching: bool
) -> None:
    world = World(
        luck=luck, depth=depth, blocks=blocks, batch_tokens=batch_tokens, caching=caching, context=28
    )
    asked: list[tuple[list[int], int, int, Answer]] = []
    ended: set[int] = set()
    for action in data.draw(st.lists(st.sampled_from(["ask", "send", "answer", "end"]), max_size=40)):
        if action == "ask":
            prompt, count = data.draw(prompts), data.draw(st.integers(1, 16))
            asked.append((prompt, count, *world.ask(prompt, count)))
        elif action == "send":
            world.send()
        elif action == "answer":
            world.answer()
        elif asked:
            number = data.draw(st.sampled_from(asked))[2]
            ended.add(number)
            for sink, delta in world.scheduler.end(number):
                sink(delta)
    world.finish()
    for prompt, count, number, answer in asked:
        alone = continued(prompt, count)
        assert answer.last is not None
        if answer.last.finish == "abort":
            assert number in ended
            assert answer.tokens == alone[: len(answer.tokens)]
        else:
            assert answer.tokens == alone
            assert answer.last.finish == ("stop" if alone[-1] == EOS else "length")
    assert_everything_came_back(world)


def test_a_shared_beginning_is_computed_once() -> None:
    world = World(blocks=40, batch_tokens=64)
    prompt = [1, 2, 3, 4] * 3
    answers = [world.ask(prompt, 4)[1] for _ in range(4)]
    step = world.scheduler.schedule()
    assert step is not None
    computed = [len(row.tokens) for row in step.rows if hasattr(row, "tokens")]
    assert computed == [12, 4, 4, 4]  # the last page has to be computed: its last token draws
    world.stream.append(step)
    world.finish()
    assert all(answer.tokens == continued(prompt, 4) for answer in answers)
    assert [answer.last.cached_tokens for answer in answers if answer.last] == [0, 8, 8, 8]


def test_a_request_that_had_to_give_way_goes_on_where_it_was() -> None:
    world = World(blocks=8, max_running=3, luck=None)
    asked = [([token, 2, 3], 24, world.ask([token, 2, 3], 24)[1]) for token in (1, 4, 5)]
    world.finish()
    assert world.scheduler.counts.preemptions > 0
    for prompt, count, answer in asked:
        assert answer.tokens == continued(prompt, count)
    assert_everything_came_back(world)


@pytest.mark.parametrize("luck", [None, 0.5])
def test_a_slot_begins_with_every_token_of_a_request_with_a_repetition_penalty(luck: float | None) -> None:
    world = World(blocks=8, max_running=3, luck=luck, batch_tokens=8)
    prompts = ([1, 2, 3, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3, 1, 2, 4], [5, 5])
    asked = [(prompt, world.ask(prompt, 20, repetition_penalty=1.5)[1]) for prompt in prompts]
    begun: list[Draw] = []
    while world.scheduler.running or world.scheduler.waiting:
        if world.send():
            rows = world.stream[-1].rows
            begun += [row.draw for row in rows if isinstance(row, Fill) and row.draw is not None]
        else:
            assert world.answer()
    texts = [prompt + answer.tokens for prompt, answer in asked]
    assert world.scheduler.counts.preemptions > 0
    assert len(begun) == len(prompts) + world.scheduler.counts.preemptions
    for draw in begun:
        assert any(
            list(draw.seen) == list(dict.fromkeys(text[:length]))
            for text in texts
            for length in range(len(text) + 1)
        )
    assert {draw.seen for draw in begun} >= {tuple(dict.fromkeys(prompt)) for prompt in prompts}


def test_guesses_that_are_right_halve_the_steps() -> None:
    plain, lucky = World(blocks=40), World(blocks=40, luck=1.0)
    prompt = next([a, b] for a in range(1, 20) for b in range(1, 20) if len(continued([a, b], 20)) == 20)
    for world in (plain, lucky):
        _, answer = world.ask(prompt, 20)
        world.finish()
        assert answer.tokens == continued(prompt, 20)
    assert lucky.scheduler.counts.steps <= plain.scheduler.counts.steps / 2 + 2
    assert lucky.scheduler.counts.accepted_tokens >= 9


def test_a_full_queue_says_so_and_takes_the_next_when_there_is_room() -> None:
    world = World(max_running=1, max_waiting=2)
    first = [world.ask([1], 4)[1] for _ in range(3)]
    with pytest.raises(QueueFull):
        world.ask([1], 4)
    while first[0].last is None:
        world.send()
        world.answer()
    first.append(world.ask([1], 4)[1])
    world.finish()
    assert all(answer.tokens == continued([1], 4) for answer in first)


@pytest.mark.parametrize(("prompt", "count"), [(30, 11), (40, 1), (1, 40)])
def test_a_request_beyond_the_context_is_refused(prompt: int, count: int) -> None:
    with pytest.raises(RequestInvalid, match="context of 40"):
        World().ask([1] * prompt, count)


def test_a_request_that_would_never_fit_into_the_cache_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="cache of 2 pages"):
        World(blocks=2).ask([1] * 20, 4)


@pytest.mark.parametrize("luck", [None, 0.5, 1.0])
@pytest.mark.parametrize("count", [23, 24])
def test_a_request_may_fill_the_whole_context(luck: float | None, count: int) -> None:
    world = World(context=4 + count, blocks=40, luck=luck)
    prompt = next([a] * 4 for a in range(1, 20) if len(continued([a] * 4, count)) == count)
    _, answer = world.ask(prompt, count)
    world.finish()
    assert answer.tokens == continued(prompt, count)


def test_a_lost_rank_ends_every_request_with_the_error() -> None:
    world = World()
    answers = [world.ask([1, 2], 4)[1] for _ in range(6)]
    world.send()
    for sink, delta in world.scheduler.fail(RankLost("rank 1 is gone")):
        sink(delta)
    assert [str(answer.last.fault) for answer in answers if answer.last] == ["rank 1 is gone"] * 6
    assert_everything_came_back(world)
