"""The torture's nursery as a program: which processes there are to fork. Started by bench/torture, never by people."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Import what is slow, then fork on request."""
    import torch

    import liveweight.engine.loading
    import liveweight.engine.models.model
    from liveweight.api import Publisher
    from liveweight.bench.torture.nursery import serve
    from liveweight.bench.torture.trainer import publisher_main, writer_main
    from liveweight.engine import rank

    del liveweight
    torch.set_num_threads(1)
    nursery = os.getpid()
    roles = {
        "rank": lambda descriptor: rank.main(descriptor, parent=nursery),
        "publisher": lambda descriptor: publisher_main(descriptor, Publisher),
        "writer": writer_main,
    }
    serve(int(sys.argv[1]), roles, os._exit)


if __name__ == "__main__":
    main()
