"""Pieces of SVG: text, lines, boxes, axes. Every value that is drawn is also written down, in `data-` attributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from liveweight.lab.demo.report.scale import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale


def tag(name: str, inside: str = "", **attributes: object) -> str:
    """An element. `_` in an attribute's name becomes `-`; a trailing `_` is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{inside}</{name}>"


def text(value: str, x: float, y: float, anchor: str = "middle", **attributes: object) -> str:
    """A piece of text at a place."""
    return tag("text", escape(value), x=x, y=y, text_anchor=anchor, **attributes)


def box(x: float, y: float, width: float, height: float, about: str, **attributes: object) -> str:
    """A rectangle with a tooltip. Never too thin to be seen."""
    inside = tag("title", escape(about))
    return tag("rect", inside, x=x, y=y, width=max(1.0, round(width, 2)), height=height, **attributes)


def curve(name: str, points: Sequence[tuple[float, float]], values: Sequence[float], class_: str) -> str:
    """A line through points."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    shown = " ".join(f"{value:.6g}" for value in values)
    return tag("polyline", points=path, id=name, class_=f"curve {class_}", data_values=shown)


def axes(x: Scale, y: Scale, x_name: str, y_name: str, *, height: float = HEIGHT) -> str:
    """Both axes with their ticks and names."""
    low, parts = height - BOTTOM, []
    for value in y.ticks():
        at = y(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(text(y.written(value), LEFT - 8, at + 4, "end"))
    parts.append(time_axis(x, x_name, height))
    middle = (TOP + low) / 2
    parts.append(text(y_name, 14, middle, class_="name", transform=f"rotate(-90 14 {middle:g})"))
    return "".join(parts)


def time_axis(x: Scale, name: str, height: float) -> str:
    """The axis below a chart."""
    low = height - BOTTOM
    line = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=low, y2=low, class_="axis")
    ticks = [text(x.written(value), x(value), low + 16) for value in x.ticks(8)]
    return line + "".join(ticks) + text(name, (LEFT + WIDTH - RIGHT) / 2, height - 6, class_="name")


def chart(name: str, title: str, description: str, parts: Iterable[str], *, height: float = HEIGHT) -> str:
    """A whole chart, with a text alternative for screen readers."""
    description = tag("title", escape(title), id=f"{name}-title") + tag(
        "desc", escape(description), id=f"{name}-desc"
    )
    return tag(
        "svg",
        description + "".join(parts),
        id=name,
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        xmlns="http://www.w3.org/2000/svg",
    )
