"""`liveweight` as the child of a program that may be killed: it ends when that program does, however that ends.

Run as `python -m liveweight.cli.child PID COMMAND...`, by the process with that id.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def main() -> None:
    """The program itself, and a thread that watches its parent."""
    parent = int(sys.argv.pop(1))
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent} has ended before its child began")
    threading.Thread(target=_follow, args=(descriptor,), name="parent", daemon=True).start()
    from liveweight.cli.main import run

    run()


def _follow(descriptor: int) -> None:
    """SIGTERM, so that it cleans up; a second one does not wait for requests."""
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
