"""Draws docs/pictures/demo.svg: what `liveweight demo` shows on a terminal at its end. Runs the whole demo. `make picture`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from liveweight.cli.demo.demo import play
from liveweight.cli.demo.terminal_picture import TerminalPicture
from liveweight.lab.demo.settings import DemoSettings

FROM_ELSEWHERE = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)
"""Fonts that rich would have fetched from the network: a monospace font of the reader's does."""


def main() -> None:
    """Run the demo without a terminal, and keep its last picture."""
    settings = DemoSettings()
    picture = TerminalPicture(settings)
    if play(settings, picture.hear) is None:
        return
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(picture.draw())
    svg = console.export_svg(title="liveweight demo")
    Path(__file__).with_name("demo.svg").write_text(FROM_ELSEWHERE.sub("", svg))


if __name__ == "__main__":
    main()
