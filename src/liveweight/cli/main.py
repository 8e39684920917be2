"""`liveweight`: the program. Collects the commands; each has a file of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

import typer

from liveweight.cli.bench import all as bench
from liveweight.cli.bench import vllm
from liveweight.cli.commands import (
    doctor,
    init_model,
    offer,
    operate,
    push,
    serve,
    snapshot,
    status,
    torture,
    update,
    verify,
)
from liveweight.cli.demo import group as demo
from liveweight.cli.exit_codes import exit_codes_text
from liveweight.cli.failures import reporting_errors

app = typer.Typer(
    name="liveweight",
    epilog=exit_codes_text(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
bench.app.command("vllm")(reporting_errors(vllm.vllm))
app.add_typer(demo.app, name="demo")
app.add_typer(snapshot.app, name="snapshot")
COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor.doctor,
    "init-model": init_model.init_model,
    "serve": serve.serve,
    "push": push.push,
    "offer": offer.offer,
    "update": update.update,
    "verify": verify.verify,
    "status": status.status,
    "torture": torture.torture,
    "undo": operate.undo,
    "pause": operate.pause,
    "resume": operate.resume,
    "sleep": operate.sleep,
    "wakeup": operate.wakeup,
}
for name, command in COMMANDS.items():
    app.command(name)(reporting_errors(command))


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        print(f"liveweight {version('liveweight')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Puts a trainer's new weights into running engines: verified to the bit, all or nothing.

    For example: liveweight push ./new http://127.0.0.1:8000 --version step_100
    """
    del version


def run() -> None:
    """The entry point. Main thread only.

    SIGINT ends every command, also one that is started with SIGINT ignored: shells do that to background jobs of scripts, and Python then
    raises no KeyboardInterrupt. A signal that is sent on purpose must end `serve`, and no command leaves half an update behind.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


if __name__ == "__main__":
    run()
