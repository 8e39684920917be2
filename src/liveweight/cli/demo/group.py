"""`liveweight demo`: runs that show what live updates are for. Collects its commands; each lives in a file of its own."""

from __future__ import annotations

import typer

from liveweight.cli.demo import demo, torn
from liveweight.cli.failures import reporting_errors

app = typer.Typer()
app.callback(invoke_without_command=True)(reporting_errors(demo.demo))
app.command("torn")(reporting_errors(torn.torn))
