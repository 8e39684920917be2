"""`liveweight demo`: runs that show what live updates are for. Collects its commands; each lives in a file of its own."""

from __future__ import annotations

import typer

from liveweight.cli import demo, demo_torn

app = typer.Typer()
app.callback(invoke_without_command=True)(demo.demo)
app.command("torn")(demo_torn.torn)
