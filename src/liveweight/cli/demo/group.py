"""`liveweight demo`: runs that show what live updates are for. Collects its commands; each lives in a file of its own."""

from __future__ import annotations

import typer

from liveweight.cli import demo, demo_torn
from liveweight.cli.failing import telling

app = typer.Typer()
app.callback(invoke_without_command=True)(telling(demo.demo))
app.command("torn")(telling(demo_torn.torn))
