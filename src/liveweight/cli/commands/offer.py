"""`liveweight offer`: offers a checkpoint directory to engines that pull it."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

import typer

from liveweight.cli.commands.push import Label, Mode, Run, Source
from liveweight.cli.commands.serve import interruptible
from liveweight.cli.exit_codes import DONE
from liveweight.cli.secrets import SecretFile

Address = Annotated[
    str | None,
    typer.Option(help="Where engines ask, such as ipc:///run/me/source.sock; by default a socket."),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Of the weights as they are offered; auto is the checkpoint's."),
]


def offer(
    directory: Source,
    version: Label,
    address: Address = None,
    run: Run = None,
    dtype: Dtype = "auto",
    transfer_mode: Mode = "ipc",
    secret_file: SecretFile = None,
) -> None:
    """Hold a checkpoint's weights ready for engines that ask for them, until Ctrl-C.

    For example: liveweight offer ./model --version step_100 --address ipc:///run/me/source.sock

    And the engine: liveweight serve ./model --weights-from ipc:///run/me/source.sock
    """
    from liveweight.api import Publisher
    from liveweight.spec.label import checked_label
    from liveweight.wire.credentials import load_or_create_secret
    from liveweight.wire.default_paths import default_directory, default_secret_file

    label = checked_label(version)
    secret = load_or_create_secret(default_secret_file() if secret_file is None else secret_file)
    where = f"ipc://{default_directory()}/source.sock" if address is None else address
    try:
        with (
            interruptible(),
            Publisher(
                directory,
                address=where,
                dtype=None if dtype == "auto" else dtype,
                secret=secret,
                transfer_mode=transfer_mode,
                run=run,
            ) as publisher,
        ):
            offered = publisher.offer(label)
            print(f"offering {offered} at {publisher.address}, digest {offered.digest}", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        raise typer.Exit(DONE) from None
