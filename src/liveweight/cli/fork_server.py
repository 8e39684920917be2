"""The torture's fork server as a program: lists the functions that it can fork. Started by lab/torture/fork_server, never by a user."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Import the slow modules once, then fork on request."""
    import torch

    import liveweight.engine.models.model
    import liveweight.engine.rank.checkpoint_loading
    from liveweight.api import Publisher
    from liveweight.engine.rank import process
    from liveweight.lab.torture.fork_server import serve
    from liveweight.lab.torture.trainer_main import publisher_main, writer_main

    del liveweight
    torch.set_num_threads(1)
    fork_server = os.getpid()
    roles = {
        "rank": lambda descriptor: process.main(descriptor, parent=fork_server),
        "publisher": lambda descriptor: publisher_main(descriptor, Publisher),
        "writer": writer_main,
    }
    serve(int(sys.argv[1]), roles, os._exit)


if __name__ == "__main__":
    main()
