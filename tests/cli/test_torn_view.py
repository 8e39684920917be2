"""How the torn demo shows what it found."""

from __future__ import annotations

import io

from rich.console import Console

from liveweight.cli.demo.torn import verdict
from liveweight.cli.demo.torn_view import TerminalView
from liveweight.lab.torn_demo.judge import TokenCounts
from liveweight.lab.torn_demo.result import SideResult, TornResult
from liveweight.lab.torn_demo.torn_demo import TornSettings

RED, GREEN = "\x1b[1;31m", "\x1b[32m"


def shown(view: TerminalView) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="standard", width=120).print(view)
    return file.getvalue()


def test_tokens_have_the_colour_of_what_they_are() -> None:
    view = TerminalView(TornSettings())
    view.judged("left", [" aa", " bb", " cc"], ["old", "new", "neither"])
    text = shown(view)
    assert f"{GREEN} bb" in text
    assert f"{RED} cc" in text
    assert f"{RED}neither 1" in text
    assert " aa" in text


def test_a_side_without_mixtures_shows_nothing_red() -> None:
    view = TerminalView(TornSettings())
    view.judged("right", [" aa", " bb"], ["old", "new"])
    view.note(None, "something happened")
    text = shown(view)
    assert RED not in text
    assert text.count("something happened") == 2


def test_words_of_tokens_are_no_markup() -> None:
    view = TerminalView(TornSettings())
    view.judged("left", ["[red]", "[/]"], ["old", "old"])
    view.note("left", "[bold]as it is")
    assert "[red][/]" in shown(view)
    assert "[bold]as it is" in shown(view)


def side(serving: str, **last: int) -> SideResult:
    parts = {
        "before": TokenCounts(old=5),
        "update": TokenCounts(),
        "after_kill": TokenCounts(old=3),
        "after_successor": TokenCounts(**last),
    }
    return SideResult(parts=parts, streamed=8 + TokenCounts(**last).total, serving=serving)


def test_it_holds_only_where_the_right_side_is_whole_and_serves_the_new_version() -> None:
    left = side("initial", neither=9)
    good = TornResult(left=left, right=side("step_2", new=4))
    assert good.holds
    assert verdict(good).splitlines()[0].startswith("in place:    9 of 17 tokens match neither version")
    for right in (
        side("step_2", new=4, neither=1),
        side("step_2", new=4, old=1),
        side("initial", new=4),
        side("step_2"),
        SideResult(parts=good.right.parts, streamed=good.right.streamed + 1, serving="step_2"),
    ):
        assert not TornResult(left=left, right=right).holds
