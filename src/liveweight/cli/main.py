"""`liveweight`: the program. Collects the sub-commands; each lives in a file of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from liveweight.cli import (
    bench,
    control,
    demo_app,
    doctor,
    init_model,
    offer,
    push,
    serve,
    snapshot,
    update,
    verify,
)
from liveweight.errors import LiveWeightError

app = typer.Typer(
    name="liveweight",
    help="Puts a trainer's new weights into running engines: verified to the bit, all or nothing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(demo_app.app, name="demo")
app.add_typer(snapshot.app, name="snapshot")
app.command("doctor")(doctor.doctor)
app.command("init-model")(init_model.init_model)
app.command("serve")(serve.serve)
app.command("push")(push.push)
app.command("offer")(offer.offer)
app.command("update")(update.update)
app.command("verify")(verify.verify)
app.command("status")(control.status)
app.command("undo")(control.undo)
app.command("pause")(control.pause)
app.command("resume")(control.resume)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"liveweight {version('liveweight')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Live weight updates."""
    del version


def run() -> None:
    """The entry point. An error of ours is one line and its remedy, and exit code 1."""
    try:
        app()
    except LiveWeightError as error:
        print(f"{error.code} {error}\n{error.remedy}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    run()
