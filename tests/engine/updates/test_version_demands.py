"""Requests that demand a version, in an engine whose weights change: the first token is of a version that meets the demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from liveweight.engine.engine import Engine
from liveweight.engine.serving.step_stream import parts_of
from liveweight.errors import VersionNotServed
from liveweight.spec.version_demand import VersionDemand
from tests.support.engine.engines import WITHIN_S, Answer, Models, greedy

Start = Callable[..., Engine]
PROMPT = [5, 6, 7, 8]


def demanding(engine: Engine, **demand: Any) -> Answer:
    """A request with that demand."""
    answer = Answer()
    engine.submit(PROMPT, greedy(4), answer.pieces.put, VersionDemand(**demand))
    return answer


def first_number(answer: Answer) -> int | None:
    """The number of the version that drew the first token."""
    assert answer.wait().finish == "length"
    return parts_of(answer.tokens[0].weights)[1]


def test_a_version_can_be_demanded_as_soon_as_publish_has_returned(
    start: Start, publisher: Any, models: Models
) -> None:
    engine = start(models.directory(), tp=2)
    sender = publisher(engine, models.directory(seed=1))
    demanding(engine, exact="initial").wait()
    for label in range(12):
        number = sender.publish(label).version.number
        assert number == label + 1
        assert first_number(demanding(engine, min=number, run=sender.run)) == number
        assert first_number(demanding(engine, exact=str(label))) == number
        with pytest.raises(VersionNotServed) as refused:
            demanding(engine, min=number + 1)
        assert refused.value.serving is not None
        assert (refused.value.serving["number"], refused.value.demanded) == (number, {"min": number + 1})
        with pytest.raises(VersionNotServed):
            demanding(engine, exact="initial")


@pytest.mark.parametrize("policy", ["recompute", "reuse", "drop"])
def test_a_waiting_request_whose_version_is_taken_back_ends_with_the_refusal_and_without_a_token(
    start: Start, publisher: Any, models: Models, policy: str
) -> None:
    engine = start(models.directory())
    sender = publisher(engine, models.directory(seed=1), kv_policy=policy)
    sender.publish("a")
    sender.publish("b")
    engine.pause("keep", WITHIN_S)
    second, any_number = demanding(engine, min=2), demanding(engine, min=1)
    sender.undo()
    engine.resume()
    with pytest.raises(VersionNotServed, match="number 1"):
        _ = second.wait().finish
    assert second.tokens == []
    assert first_number(any_number) == 1


def test_a_waiting_request_with_an_exact_demand_is_not_answered_by_the_next_version(
    start: Start, publisher: Any, models: Models
) -> None:
    engine = start(models.directory())
    sender = publisher(engine, models.directory(seed=1))
    sender.publish("a")
    engine.pause("keep", WITHIN_S)
    exact, smallest = demanding(engine, exact="a"), demanding(engine, min=1)
    sender.publish("b")
    engine.resume()
    with pytest.raises(VersionNotServed):
        _ = exact.wait().finish
    assert first_number(smallest) == 2
